"""A simulated neuron device, for tests: its build, and the launcher of ranks that have one.

csrc/ is the device, shim/ a `torch_neuronx` that only simulated ranks can import. Host code that
dereferences device memory dies of SIGSEGV, device bytes are no part of the resident set, and every
copy is counted. Not faithful: no streams, CPU numerics, no timing, no compiler.
"""
