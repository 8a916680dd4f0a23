"""The operators: plain torch, fast (`quick`) and careful (`reference*`), C++ (`cpu`) and Triton (`cuda`)."""
