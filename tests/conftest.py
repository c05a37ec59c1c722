import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: kernels.py runs on the CPU here, where it is asked to
