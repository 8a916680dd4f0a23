"""The compiled kernel of the CPU: finding it (`native`), and its C++ (`csrc`)."""
