"""Compile the Triton kernels of group norm for a GPU that need not be here: the interpreter accepts what the compiler does not.

Run as a script, with TRITON_INTERPRET=0, as Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

from typing import Any

NUMBERS = ("samples", "channels", "length", "chunk", "splits", "first", "size", "groups", "members", "ranks")
#: The constants of each kernel, by name those that Triton makes of arguments that are 1 among them.
CONSTANTS: dict[str, dict[str, Any]] = {
    "statistics": {},
    "normalize": {"REST": True, "WEIGHT": True, "BIAS": True},
    "products": {},
    "input_gradient": {"WEIGHT": True, "WEIGHTED": False},
    "merge_chunks": {"BLOCK": 64},
    "merge_ranks": {"EPS": 1e-5, "BY_GROUP": True, "BLOCK": 64},
    "merge_products": {"WEIGHT": True, "BLOCK": 64, "BLOCK_I": 4, "BLOCK_C": 16},
}


def compile_all() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from torchhalo.kernels.triton import group_norm

    for name, constants in CONSTANTS.items():
        kernel = getattr(group_norm, name)
        large = {"LAST", "BLOCK_S"} <= set(kernel.arg_names)
        for last, wide, ones in ((True, False, ()), (False, True, ()), (True, False, NUMBERS)):
            known = {**constants, **({"LAST": last, "BLOCK_S": 16, "BLOCK_C": 32, "STAGES": 2} if large else {}), "WIDE": wide}
            known |= dict.fromkeys(ones, 1)
            known = {each: value for each, value in known.items() if each in kernel.arg_names}
            narrow, sums = ("*fp64", "*fp64") if wide else ("*bf16", "*fp32")
            types = {
                "x": narrow,
                "grad": narrow,
                "out": narrow,
                "weight": narrow,
                "bias": narrow,
                "parts": "*fp64",
                "shares": "*fp64",
            }
            signature = {
                each: "constexpr" if each in known else "i32" if each in NUMBERS else types.get(each, sums)
                for each in kernel.arg_names
            }
            places = {(kernel.arg_names.index(each),): value for each, value in known.items()}
            source = ASTSource(fn=kernel, signature=signature, constexprs=places)
            triton.compile(source, target=GPUTarget("cuda", 90, 32))


if __name__ == "__main__":
    compile_all()
