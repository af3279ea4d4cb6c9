"""What is fuzzed, by hypothesis (tests/test_fuzz.py) and by atheris (`python -m tests.fuzz`)."""
