"""The compiled kernel of the CPU: finding it (`loader`), and its C++ (`csrc`)."""
