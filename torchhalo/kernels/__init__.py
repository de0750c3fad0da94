"""Local kernels that torch lacks or chooses badly. They see plain tensors of one rank; Triton's source lies apart.

Knows geometry and torch_internals. Knows nothing of meshes, layouts or exchanges.
"""
