"""`torchlml gpu-check`: is what the kernels compute on your GPU right, and what does it cost?"""
