"""The operators three times: in plain torch (`reference*`), in C++ (`cpu`) and in Triton (`cuda`)."""
