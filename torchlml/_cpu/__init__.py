"""The compiled CPU kernel: its loader (`loader`) and its C++ source (`csrc`)."""
