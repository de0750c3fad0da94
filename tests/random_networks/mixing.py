"""Blocks of norms, activations, reductions, tokens, attention, tables and Fourier transforms."""

from __future__ import annotations

from math import prod
from random import Random

import torch
from torch import nn
from torch.nn import functional as F

from random_networks import norms  # noqa: F401  (these blocks come first)
from random_networks.block import Block, block, conv, divisor, of, parameter

ACTIVATIONS = [F.gelu, F.elu, F.softplus, F.mish, F.hardtanh, F.relu6, F.selu, F.logsigmoid, F.silu, F.tanhshrink, F.softsign]


@block
def activation(r: Random, n: int, c: int, *s: int) -> nn.Module:
    if r.random() < 0.2:
        return nn.PReLU(r.choice([1, c]))
    function = r.choice(ACTIVATIONS)
    return Block(lambda m, x: function(x))


@block
def activation_in_place(r: Random, n: int, c: int, *s: int) -> nn.Module:
    kind = r.choice([nn.ReLU, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.ELU, nn.ReLU6, nn.Hardsigmoid, nn.Mish])
    return nn.Sequential(conv(len(s), c, c), kind(inplace=True))


@block
def arithmetic_in_place(r: Random, n: int, c: int, *s: int) -> nn.Module:
    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        y = m.conv(x)
        y += x
        y.mul_(m.factor).add_(1.0)
        return y.clamp_(-3, 3)

    return Block(forward, conv=conv(len(s), c, c), factor=parameter(c, *[1] * len(s)))


@block
def choice_by_sign(r: Random, n: int, c: int, *s: int) -> nn.Module:
    if r.random() < 0.5:
        return Block(lambda m, x: torch.where(x > 0, x, m.other * x), other=parameter(c, *[1] * len(s)))
    return Block(lambda m, x: x.masked_fill(x < -1, 0.25) * m.factor, factor=parameter(1))


@block
def gate(r: Random, n: int, c: int, *s: int) -> nn.Module:
    kind = r.randint(0, 2)
    if kind == 0:
        return Block(lambda m, x: x * m.conv(x).sigmoid(), conv=conv(len(s), c, c, 3, padding=1))
    if kind == 1:
        return Block(lambda m, x: F.glu(m.conv(x), 1), conv=conv(len(s), c, 2 * r.randint(1, 3)))

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        a, b = m.conv(x).chunk(2, 1)
        return a * F.gelu(b)

    return Block(forward, conv=conv(len(s), c, 2 * r.randint(1, 3)))


@block
def squeeze_and_excite(r: Random, n: int, c: int, *s: int) -> nn.Module:
    down, up = conv(len(s), c, 2), conv(len(s), 2, c)
    dims = tuple(range(2, len(s) + 2))
    if r.random() < 0.5:
        pool = of("AdaptiveAvgPool", len(s))(1)
        return Block(lambda m, x: x * m.up(F.relu_(m.down(m.pool(x)))).sigmoid(), pool=pool, down=down, up=up)
    return Block(lambda m, x: x * F.hardsigmoid(m.up(F.relu(m.down(x.mean(dims, keepdim=True))))), down=down, up=up)


@block
def pooled_linear_gate(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """Scale and shift of the channels by linear layers of the pooled sample."""

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        scale, shift = m.linear(F.silu(x.flatten(2).mean(2))).chunk(2, 1)
        shape = (n, c, *[1] * len(s))
        return x * (1 + scale.view(shape)) + shift.view(shape)

    return Block(forward, linear=nn.Linear(c, 2 * c))


@block
def statistics_gate(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """Mean and largest of the channels, convolved, as a gate."""
    return Block(
        lambda m, x: x * m.conv(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)).sigmoid(),
        conv=conv(len(s), 2, 1, 3, padding=1),
    )


@block
def coordinate_gate(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    """Means along rows and columns, through one convolution, split again."""
    if len(s) != 2:
        return None
    h, w = s

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x.mean(3, keepdim=True), x.mean(2, keepdim=True).transpose(2, 3)], 2)
        a, b = m.conv(y).split([h, w], 2)
        return x * a.sigmoid() * b.transpose(2, 3).sigmoid()

    return Block(forward, conv=conv(2, c, c))


@block
def reduction(r: Random, n: int, c: int, *s: int) -> nn.Module:
    dim = r.randint(1, len(s) + 1)
    kind = r.choice(["softmax", "log_softmax", "cumsum", "logsumexp", "amax", "max", "sum", "cumprod", "min"])
    if kind in ("softmax", "log_softmax", "cumsum"):
        return Block(lambda m, x: getattr(x, kind)(dim))
    if kind == "cumprod":
        return Block(lambda m, x: (1 + 0.1 * x.tanh()).cumprod(dim))
    if kind in ("max", "min"):
        return Block(lambda m, x: x - getattr(x, kind)(dim, keepdim=True)[0])
    return Block(lambda m, x: x - 0.5 * getattr(x, kind)(dim, keepdim=True))


@block
def ordered(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """By their order along the channels."""
    if r.random() < 0.5:
        return Block(lambda m, x: x.sort(1)[0] * m.factor, factor=parameter(c, *[1] * len(s)))
    count = r.randint(1, c)
    return Block(lambda m, x: x.topk(count, 1)[0])


@block
def channels_by_index(r: Random, n: int, c: int, *s: int) -> nn.Module:
    order = torch.tensor([r.randrange(c) for _ in range(r.randint(1, 5))])
    if r.random() < 0.5:
        return Block(lambda m, x: x[:, m.order], order=order)
    return Block(lambda m, x: x.index_select(1, m.order), order=order)


@block
def einsum(r: Random, n: int, c: int, *s: int) -> nn.Module:
    out, letters = r.randint(1, 5), "xyz"[: len(s)]
    if r.random() < 0.6:
        text = f"nc{letters},oc->no{letters}"
        return Block(lambda m, x: torch.einsum(text, x, m.weight), weight=parameter(out, c))
    text = f"nc{letters},c{letters}->nc{letters}"
    return Block(lambda m, x: torch.einsum(text, x, m.weight), weight=parameter(c, *s))


@block
def linear_along_space(r: Random, n: int, c: int, *s: int) -> nn.Module:
    if r.random() < 0.5:
        return nn.Linear(s[-1], r.randint(1, 8), bias=r.random() < 0.7)
    return (
        Block(lambda m, x: m.mix(x.flatten(2)).unflatten(2, s) + x, mix=nn.Linear(prod(s), prod(s))) if prod(s) < 200 else None
    )


def over_tokens(body: nn.Module, s: tuple[int, ...]) -> Block:
    """``body`` over the space as tokens (batch, tokens, channels)."""
    return Block(lambda m, x: m.body(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, s), body=body)


@block
def token_layers(r: Random, n: int, c: int, *s: int) -> nn.Module:
    hidden, out = r.randint(1, 8), r.randint(1, 6)
    norm = [nn.LayerNorm(c)] if c > 1 and r.random() < 0.5 else []
    act = r.choice([nn.GELU(), nn.ReLU(inplace=True), nn.SiLU()])
    if r.random() < 0.3:
        layers = nn.Sequential(*norm, nn.Linear(c, hidden), act, nn.Linear(hidden, out))
        return Block(lambda m, x: m.layers(x.movedim(1, -1)).movedim(-1, 1), layers=layers)
    return over_tokens(nn.Sequential(*norm, nn.Linear(c, hidden), act, nn.Linear(hidden, out)), s)


@block
def multihead_attention(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    if prod(s) > 200:
        return None
    heads = divisor(r, c)
    attention = nn.MultiheadAttention(c, heads, batch_first=True)
    return over_tokens(Block(lambda m, x: x + m.attention(x, x, x, need_weights=False)[0], attention=attention), s)


@block
def attention(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    """Of heads, fused or written out, with keys and values that may be pooled."""
    if prod(s) > 200:
        return None
    heads = divisor(r, c)
    kind = r.choice(["fused", "written", "linear", "causal"])

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.qkv(x).view(n, prod(s), 3, heads, c // heads).permute(2, 0, 3, 1, 4).unbind(0)
        if kind in ("fused", "causal"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=kind == "causal")
        elif kind == "written":
            y = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        else:
            y = q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)
        return m.out(y.transpose(1, 2).reshape(n, prod(s), c))

    return over_tokens(Block(forward, qkv=nn.Linear(c, 3 * c, bias=r.random() < 0.5), out=nn.Linear(c, c)), s)


@block
def attention_by_convolution(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    """Queries from every place, keys and values from a pooled tensor."""
    if prod(s) > 300 or min(s) < 2:
        return None
    inner = r.randint(1, 3)

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.q(x).flatten(2), m.k(m.pool(x)).flatten(2), m.v(m.pool(x)).flatten(2)
        weights = torch.bmm(q.transpose(1, 2), k).softmax(-1)
        return x + m.factor * torch.bmm(v, weights.transpose(1, 2)).view(n, c, *s)

    parts = {"q": conv(len(s), c, inner), "k": conv(len(s), c, inner), "v": conv(len(s), c, c)}
    return Block(forward, **parts, pool=of("MaxPool", len(s))(2), factor=parameter(1))


@block
def window_attention(r: Random, n: int, c: int, *s: int) -> nn.Module | None:
    """In windows, which may be shifted, with a position bias read from a table by index."""
    if len(s) != 2 or any(size % 2 for size in s) or prod(s) > 150:
        return None
    h, w = s
    size, shift, bias = 2, r.randint(0, 1), r.random() < 0.6
    place = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
    index = ((place[:, :, None] - place[:, None, :] + size - 1) * torch.tensor([2 * size - 1, 1])[:, None, None]).sum(0)

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        y = x.permute(0, 2, 3, 1)
        y = y.roll((-shift, -shift), (1, 2)) if shift else y
        y = y.reshape(n, h // size, size, w // size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, c)
        q, k, v = m.qkv(y).chunk(3, -1)
        weights = q @ k.transpose(1, 2)
        if bias:
            weights = weights + m.table[m.index.view(-1)].view(size * size, size * size)
        y = weights.softmax(-1) @ v
        y = y.view(n, h // size, w // size, size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        y = y.roll((shift, shift), (1, 2)) if shift else y
        return x + y.permute(0, 3, 1, 2)

    return Block(forward, qkv=nn.Linear(c, 3 * c), index=index, table=parameter((2 * size - 1) ** 2))


@block
def context(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """One vector per sample, a mean weighted by a softmax over space, added everywhere."""

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        weights = m.conv(x).flatten(2).softmax(2)
        y = torch.matmul(x.flatten(2), weights.transpose(1, 2))
        return x + m.mix(y.transpose(1, 2)).transpose(1, 2).view(n, c, *[1] * len(s))

    return Block(forward, conv=conv(len(s), c, 1), mix=nn.Linear(c, c))


@block
def table_by_index(r: Random, n: int, c: int, *s: int) -> nn.Module:
    rows = r.randint(1, 6)
    index = torch.randint(rows, s)
    if r.random() < 0.5:
        return Block(
            lambda m, x: x + m.table[m.index.view(-1)].view(*s, c).movedim(-1, 0), table=parameter(rows, c), index=index
        )
    return Block(lambda m, x: x + m.table(m.index).movedim(-1, 0), table=nn.Embedding(rows, c), index=index)


@block
def nearest_code(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """Each place is replaced by the nearest row of a table, with the gradient passed through."""

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        y = x.movedim(1, -1)
        distance = y.pow(2).sum(-1, keepdim=True) - 2 * y @ m.codes.weight.t() + m.codes.weight.pow(2).sum(1)
        code = m.codes(distance.argmin(-1)).movedim(-1, 1)
        return x + (code - x).detach() + 0.25 * code

    return Block(forward, codes=nn.Embedding(r.randint(2, 6), c))


@block
def positions(r: Random, n: int, c: int, *s: int) -> nn.Module:
    kind = r.randint(0, 3)
    if kind == 0:
        return Block(lambda m, x: x + m.table, table=parameter(1, c, *s))
    if kind == 1:
        mode = ["linear", "bilinear", "trilinear"][len(s) - 1]
        return Block(lambda m, x: x + F.interpolate(m.table, s, mode=mode), table=parameter(1, c, *[4] * len(s)))
    if kind == 2:
        return over_tokens(Block(lambda m, x: x * m.table, table=parameter(1, prod(s), c)), s)

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        axes = [torch.linspace(-1, 1, size, dtype=x.dtype, device=x.device) for size in s]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij")).expand(n, *[-1] * (len(s) + 1))
        return m.conv(torch.cat([x, grid], 1))

    return Block(forward, conv=conv(len(s), c + len(s), c, 3, padding=1))


@block
def fourier(r: Random, n: int, c: int, *s: int) -> nn.Module:
    dims = tuple(range(2, len(s) + 2))
    norm = r.choice(["ortho", "backward", "forward"])
    kind = r.randint(0, 2)
    if kind == 0:
        return Block(lambda m, x: torch.fft.fftn(x, dim=dims, norm="ortho").real + x)
    if kind == 1:
        return Block(
            lambda m, x: torch.fft.irfftn(
                torch.fft.rfftn(x, dim=dims, norm=norm) * torch.view_as_complex(m.weight), s=s, dim=dims, norm=norm
            ),
            weight=parameter(c, *[1] * len(s), 2),
        )

    def forward(m: Block, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.rfftn(x, dim=dims, norm="ortho")
        y = m.conv(torch.cat([y.real, y.imag], 1))
        real, imaginary = F.relu(y).chunk(2, 1)
        return torch.fft.irfftn(torch.complex(real, imaginary), s=s, dim=dims, norm="ortho")

    return Block(forward, conv=conv(len(s), 2 * c, 2 * c))


@block
def folded_channels(r: Random, n: int, c: int, *s: int) -> nn.Module:
    """Channels as part of the batch."""
    return Block(lambda m, x: m.conv(x.reshape(n * c, 1, *s)).view(n, c, *s), conv=conv(len(s), 1, 1, 3, padding=1))


@block
def layout_change(r: Random, n: int, c: int, *s: int) -> nn.Module:
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    kind = r.choice(["contiguous", "channels last", "permuted", "moved"])
    if kind == "channels last" and len(s) in formats:
        return Block(lambda m, x: x.contiguous(memory_format=formats[len(s)]))
    if kind == "permuted":
        return Block(lambda m, x: x.permute(0, *range(2, x.ndim), 1).contiguous().permute(0, -1, *range(1, x.ndim - 1)))
    if kind == "moved" and len(s) > 1:
        sizes = [3, *[1] * (len(s) - 1)]
        return Block(lambda m, x: m.conv(x.transpose(-1, -2)), conv=conv(len(s), c, c, sizes, padding=[k // 2 for k in sizes]))
    return Block(lambda m, x: x.clone().contiguous())
