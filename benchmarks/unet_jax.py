"""The U-Net step in JAX, compiled, with its activations sharded over the devices of one process.

A program of its own, because the number of CPU devices is set before JAX starts. It prints one line of JSON.
"""

from __future__ import annotations

import json
import re
import sys
import time
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.unet_model import GROUPS, Shape

BYTES = {"f32": 4, "bf16": 2, "f16": 2}


def conv(x: Any, layer: dict[str, Any], dims: int) -> Any:
    pad = [(size // 2,) * 2 for size in layer["w"].shape[2:]]
    out = lax.conv_general_dilated(x, layer["w"], (1,) * dims, pad)
    return out + layer["b"].reshape(-1, *[1] * dims)


def up(x: Any, layer: dict[str, Any], dims: int) -> Any:
    """Transposed convolution with kernel and stride 2."""
    order = tuple(channels + "DHW"[3 - dims :] for channels in ("NC", "IO", "NC"))
    out = lax.conv_transpose(x, layer["w"], (2,) * dims, "VALID", dimension_numbers=order)
    return out + layer["b"].reshape(-1, *[1] * dims)


def norm(x: Any, layer: dict[str, Any], shape: Shape) -> Any:
    spatial = tuple(range(2, x.ndim))
    if shape.norm == "batch":
        out = (x - x.mean((0, *spatial), keepdims=True)) * lax.rsqrt(x.var((0, *spatial), keepdims=True) + 1e-5)
    else:
        split = x.reshape(x.shape[0], GROUPS, -1, *x.shape[2:])
        axes = tuple(range(2, split.ndim))
        out = (split - split.mean(axes, keepdims=True)) * lax.rsqrt(split.var(axes, keepdims=True) + 1e-5)
        out = out.reshape(x.shape)
    return out * layer["g"].reshape(-1, *[1] * len(spatial)) + layer["b"].reshape(-1, *[1] * len(spatial))


def block(x: Any, layers: list[dict[str, Any]], shape: Shape) -> Any:
    for layer in layers:
        x = jax.nn.relu(norm(conv(x, layer["conv"], shape.dims), layer["norm"], shape))
    return x


def forward(parameters: dict[str, Any], x: Any, shape: Shape) -> Any:
    window = (1, 1, *[2] * shape.dims)
    skips = []
    for level, layers in enumerate(parameters["down"]):
        x = lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID") if level else x
        x = block(x, layers, shape)
        skips.append(x)
    skips.pop()
    for layer, layers in zip(parameters["up"], parameters["join"], strict=True):
        x = block(jnp.concatenate([skips.pop(), up(x, layer, shape.dims)], 1), layers, shape)
    return conv(x, parameters["head"], shape.dims)


def initial(shape: Shape) -> dict[str, Any]:
    """Parameters of the same shapes as those of `unet_model.UNet`."""
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def weights(first: int, last: int, kernel: int, transposed: bool = False) -> dict[str, Any]:
        sizes = (first, last) if transposed else (last, first)
        scale = (first * kernel**shape.dims) ** -0.5
        w = jax.random.uniform(next(keys), (*sizes, *[kernel] * shape.dims), minval=-scale, maxval=scale)
        return {"w": w, "b": jnp.zeros(last)}

    def layers(first: int, last: int) -> list[dict[str, Any]]:
        return [{"conv": weights(n, last, 3), "norm": {"g": jnp.ones(last), "b": jnp.zeros(last)}} for n in (first, last)]

    widths = shape.widths
    pairs = list(zip(widths[1:], widths, strict=False))[::-1]
    return {
        "down": [layers(below, width) for below, width in zip([1, *widths], widths, strict=False)],
        "up": [weights(deep, width, 2, transposed=True) for deep, width in pairs],
        "join": [layers(2 * width, width) for _, width in pairs],
        "head": weights(shape.width, 1, 1),
    }


def step(parameters: dict[str, Any], image: Any, target: Any, shape: Shape) -> tuple[dict[str, Any], Any]:
    def loss(parameters: dict[str, Any]) -> Any:
        return jnp.square(forward(parameters, image, shape) - target).mean()

    value, grads = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda parameter, grad: parameter - 1e-2 * grad, parameters, grads), value


def permuted(program: str) -> int:
    """The bytes that the collective-permutes of a compiled program send, over all of its pairs of devices."""
    total = 0
    for line in program.splitlines():
        found = re.search(r"= \(?(\w+)\[([\d,]*)\][^=]*collective-permute(?:-start)?\(", line)
        if found:
            elements = 1
            for size in filter(None, found[2].split(",")):
                elements *= int(size)
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line)
            total += elements * BYTES.get(found[1], 4) * (pairs[1].count("{") if pairs else 1)
    return total


def main() -> None:
    shape, steps = Shape(*json.loads(sys.argv[1])), int(sys.argv[2])
    mesh = Mesh(jax.devices(), ("space",))
    cut, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((None, None, "space"), ()))
    parameters = jax.device_put(initial(shape), whole)
    image, target = (jax.device_put(jax.random.normal(jax.random.key(n), shape.input), cut) for n in (1, 2))
    train = jax.jit(partial(step, shape=shape), donate_argnums=0, out_shardings=(whole, whole))
    compiled = train.lower(parameters, image, target).compile()
    times = []
    for _ in range(2 + steps):
        begin = time.monotonic()
        parameters, value = compiled(parameters, image, target)
        jax.block_until_ready((parameters, value))
        times.append(time.monotonic() - begin)
    text = compiled.as_text()
    gathers = len(re.findall(r"= .*\ball-gather(?:-start)?\(", text))
    memory = compiled.memory_analysis().temp_size_in_bytes
    found = {"version": jax.__version__, "times": times[2:], "memory": memory, "sent": permuted(text), "gathers": gathers}
    print(json.dumps(found | {"loss": float(value), "median": median(times[2:])}))


if __name__ == "__main__":
    main()
