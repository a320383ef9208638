"""The models of `bench_gpu.py` in PyTorch, as its users would tune them: scaled_dot_product_attention (its flash
kernel), bfloat16 autocast with float32 weights, fused AdamW, TF32 for what is left in float32, torch.compile."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .in_jax import relative
from .models import Row

Tensor = Any


class Attention(nn.Module):
    """Self-attention, with fewer heads of keys if `key_heads` says so, and rotary positions where they are given."""

    def __init__(self, width: int, heads: int, head_dim: int, key_heads: int, causal: bool, bias: bool):
        super().__init__()
        self.heads, self.key_heads, self.head_dim, self.causal = heads, key_heads, head_dim, causal
        self.qkv = nn.Linear(width, (heads + 2 * key_heads) * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, width, bias=bias)

    def forward(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        sizes = [n * self.head_dim for n in (self.heads, self.key_heads, self.key_heads)]
        q, k, v = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in self.qkv(x).split(sizes, dim=-1)
        )
        if rotary is not None:
            q, k = turned(q, rotary), turned(k, rotary)
        grouped = self.key_heads != self.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


def turned(x: Tensor, rotary: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotary
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class MLP(nn.Module):
    """Two linear layers with `act` between them; gated by a third if `gated`."""

    def __init__(self, width: int, inner: int, act: Callable[[Tensor], Tensor], gated: bool, bias: bool):
        super().__init__()
        self.act = act
        self.up = nn.Linear(width, inner, bias=bias)
        self.gate = nn.Linear(width, inner, bias=bias) if gated else None
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.up(x)) if self.gate is None else self.act(self.gate(x)) * self.up(x)
        return self.down(inner)


class Experts(nn.Module):
    """Of each token's `top` experts the weighted sum; tokens are sorted by expert for it, and experts multiply their
    rows in one kernel."""

    def __init__(self, width: int, inner: int, num: int, top: int):
        super().__init__()
        self.num, self.top = num, top
        self.router = nn.Linear(width, num, bias=False)
        self.gate, self.up, self.down = (
            nn.Parameter(torch.randn(num, *shape) / math.sqrt(shape[0]))
            for shape in ((width, inner), (width, inner), (inner, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, which = self.router(tokens).float().softmax(-1).topk(self.top, dim=-1)
        expert, order = which.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(self.num, device=x.device), right=True).int()
        # Autocast knows nothing of this product.
        given = tokens[order // self.top].to(torch.bfloat16)
        gate, up, down = (weight.to(torch.bfloat16) for weight in (self.gate, self.up, self.down))
        inner = F.silu(grouped(given, gate, ends)) * grouped(given, up, ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        made = grouped(inner, down, ends)[back].unflatten(0, (-1, self.top))
        return (made * weights[..., None].to(made.dtype)).sum(1).view_as(x).to(x.dtype)


def grouped(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return getattr(F, "grouped_mm", torch._grouped_mm)(rows, weights, offs=ends)


class Block(nn.Module):
    """Norms before the branches, or after them, as in BERT."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, norm: Callable[[], nn.Module], after: bool):
        super().__init__()
        self.attention, self.mlp, self.after = attention, mlp, after
        self.norm1, self.norm2 = norm(), norm()

    def forward(self, x: Tensor, rotary: Tensor | None) -> Tensor:
        if self.after:
            x = self.norm1(x + self.attention(x, rotary))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x), rotary)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """GPT, BERT, ViT, Llama or mixture of a row, and its loss."""

    def __init__(self, row: Row):
        super().__init__()
        config, kind = row.config, row.kind
        self.kind, width, llama = kind, config.embed_dim, kind in ("llama", "mixture")
        head_dim = getattr(config, "head_dim", None) or width // config.num_heads
        key_heads = config.num_kv_heads if llama else config.num_heads
        epsilon = {"bert": 1e-12, "vit": 1e-6}.get(kind, 1e-5)
        act = F.silu if llama else (lambda x: F.gelu(x, approximate="tanh" if kind == "gpt" else "none"))
        inner = config.mlp_dim or 4 * width

        def norm() -> nn.Module:
            return nn.RMSNorm(width, eps=epsilon) if llama else nn.LayerNorm(width, eps=epsilon)

        def block() -> Block:
            causal = kind in ("gpt", "llama", "mixture")
            attention = Attention(width, config.num_heads, head_dim, key_heads, causal, not llama)
            if kind == "mixture":
                return Block(attention, Experts(width, inner, config.num_experts, config.top), norm, False)
            return Block(attention, MLP(width, inner, act, llama, not llama), norm, kind == "bert")

        self.blocks = nn.ModuleList([block() for _ in range(config.num_layers)])
        self.norm = norm()
        self.rotary: Tensor | None = None
        if kind == "vit":
            self.patches = nn.Conv2d(3, width, config.patch_size, config.patch_size)
            self.first = nn.Parameter(torch.zeros(1, 1, width))
            self.positions = nn.Parameter(torch.zeros(1, row.tokens, width))
            self.head = nn.Linear(width, config.num_classes)
            return
        self.embed = nn.Embedding(config.vocab_size, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        if kind in ("gpt", "bert"):
            self.positions = nn.Parameter(torch.zeros(row.seq, width))
        if kind == "bert":
            self.types = nn.Parameter(torch.zeros(width))
            self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), norm())
        if llama:
            angles = torch.arange(row.seq)[:, None] * config.rope_theta ** (-torch.arange(0, head_dim, 2) / head_dim)
            self.register_buffer("angles", angles.float(), persistent=False)
        tied = getattr(config, "tied", True)
        self.head = nn.Linear(width, config.vocab_size, bias=kind == "bert")
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if self.kind == "vit":
            x = self.patches(batch["images"].permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
            x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.positions
        else:
            x = self.embed(batch["inputs"])
            if self.kind in ("gpt", "bert"):
                x = x + self.positions
        rotary = None if self.kind not in ("llama", "mixture") else (self.angles.cos(), self.angles.sin())
        if self.kind == "bert":
            x = self.norm(x + self.types)
        for block in self.blocks:
            x = block(x, rotary)
        if self.kind == "vit":
            return F.cross_entropy(self.head(self.norm(x)[:, 0]).float(), batch["labels"].long())
        x = self.transform(x) if self.kind == "bert" else self.norm(x)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), batch["targets"].long().view(-1))


class Heads(nn.Module):
    """T5's attention: no biases, scores that are not scaled; of one text, or of two if `cross`."""

    def __init__(self, width: int, heads: int, head_dim: int, cross: bool):
        super().__init__()
        self.head_dim, inner = head_dim, heads * head_dim
        self.sizes = [inner] * 3 if not cross else [inner] * 2
        self.query = nn.Linear(width, inner, bias=False) if cross else None
        self.joint = nn.Linear(width, sum(self.sizes), bias=False)
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
        parts = [] if self.query is None else [self.query(x)]
        parts += self.joint(other).split(self.sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        mask = None if mask is None else mask.to(q.dtype)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Of T5's encoder, or of its decoder if `cross`."""

    def __init__(self, config: Any, cross: bool):
        super().__init__()
        width, sizes = config.embed_dim, (config.embed_dim, config.num_heads, config.head_dim)
        act = (lambda x: F.gelu(x, approximate="tanh")) if config.gated else F.relu
        self.attention, self.cross = Heads(*sizes, cross=False), Heads(*sizes, cross=True) if cross else None
        self.mlp = MLP(width, config.mlp_dim, act, config.gated, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(width, eps=config.norm_epsilon) for _ in range(3 if cross else 2)])

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None) -> Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, mask)
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory, None)
        return x + self.mlp(self.norms[1](x))


class Stack(nn.Module):
    """T5's encoder or decoder: what all its layers add to scores is made once."""

    def __init__(self, row: Row, layers: int, cross: bool):
        super().__init__()
        config = row.config
        self.causal = cross
        self.table = nn.Embedding(config.num_buckets, config.num_heads)
        kinds = torch.from_numpy(relative(config, row.seq, both_ways=not cross)).long()
        self.register_buffer("kinds", kinds, persistent=False)
        self.register_buffer("later", torch.ones(row.seq, row.seq, dtype=torch.bool).triu(1), persistent=False)
        self.layers = nn.ModuleList([Layer(config, cross) for _ in range(layers)])
        self.norm = nn.RMSNorm(config.embed_dim, eps=config.norm_epsilon)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        mask = self.table(self.kinds).permute(2, 0, 1)[None].contiguous()
        if self.causal:
            # SDPA takes a mask or `is_causal`, not both.
            mask = mask.masked_fill(self.later, float("-inf"))
        for layer in self.layers:
            x = layer(x, mask, memory)
        return self.norm(x)


class T5(nn.Module):
    """T5 of a row, and its loss."""

    def __init__(self, row: Row):
        super().__init__()
        config = row.config
        self.embed = nn.Embedding(config.vocab_size, config.embed_dim)
        self.encoder = Stack(row, config.num_layers, cross=False)
        self.decoder = Stack(row, config.decoder_layers, cross=True)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        self.scale = config.embed_dim**-0.5 if config.tied else 1.0
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        memory = self.encoder(self.embed(batch["source"]), None)
        logits = self.head(self.decoder(self.embed(batch["inputs"]), memory) * self.scale)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), batch["targets"].long().view(-1))


def model_of(row: Row) -> nn.Module:
    return T5(row) if row.kind == "t5" else Model(row)


def make_step(row: Row, batch: dict[str, Any], compiled: bool) -> tuple[Callable[[], float], Callable[[], int]]:
    """(a step that gives its loss, peak bytes so far), on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model = model_of(row).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-2, fused=device == "cuda")
    given = {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
    run = torch.compile(model) if compiled else model
    low: Any = torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()

    def step() -> float:
        with low:
            loss = run(given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def peak() -> int:
        return torch.cuda.max_memory_allocated() if device == "cuda" else 0

    return step, peak


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def num_params(row: Row) -> int:
    return sum(math.prod(p.shape) for p in model_of(row).parameters())
