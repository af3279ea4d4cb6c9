"""Bundled manifests: one TOML file an architecture, no code."""
