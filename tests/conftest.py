"""What all tests need before anything is imported: triton's interpreter, so that kernels run on CPU tensors.

triton looks at the variable whenever it meets `@triton.jit`, in its own library too, so it must be set before triton
is first imported. Tests that compile kernels do so in a process without it (tests/kernels/test_triton_compiled.py).
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # interpreted kernels are for the CPU, and so are the servers of the tests
