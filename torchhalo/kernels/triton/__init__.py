"""Triton kernels. Imported only by the file of the same name in ``kernels``, when a GPU or the interpreter needs them."""
