"""The two halves of a layer, counted: attention (or what stands in its place), and the MLP or experts."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.arch.outline import LayerOutline


@dataclass(frozen=True)
class MixerOutline:
    """Where tokens meet each other."""

    linear: int
    vectors: int = 0
    kv_values: int = 0
    pair_values: int = 0
    num_heads: int = 1
    num_kv_heads: int = 1
    width: int = 0
    window: int | None = None
    state_values: int = 0


@dataclass(frozen=True)
class FeedOutline:
    """Where each token is alone."""

    linear: int = 0
    vectors: int = 0
    width: int = 0
    experts: int = 0
    num_experts: int = 0
    num_active: int = 0


NOTHING_MIXED, NOTHING_FED = MixerOutline(0), FeedOutline()


def layer(mixer: MixerOutline, feed: FeedOutline, norms: int) -> LayerOutline:
    """`norms`: values of the norms around the two."""
    return LayerOutline(
        linear=mixer.linear + feed.linear,
        vectors=mixer.vectors + feed.vectors + norms,
        kv_values=mixer.kv_values,
        pair_values=mixer.pair_values,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        width=max(mixer.width, feed.width),
        window=mixer.window,
        experts=feed.experts,
        num_experts=feed.num_experts,
        num_active=feed.num_active,
        state_values=mixer.state_values,
    )


def grouped_attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    norms: int = 0,
    gates: bool = False,
    window: int | None = None,
) -> MixerOutline:
    """`norms`: values of norms on queries and keys, or other vectors; `gates`: queries come with as many gates."""
    q, kv = heads * head_dim, kv_heads * head_dim
    projected = q * (2 if gates else 1) + 2 * kv
    return MixerOutline(
        linear=hidden * projected + q * hidden,
        vectors=(projected if qkv_bias else 0) + (hidden if out_bias else 0) + norms,
        kv_values=2 * kv,
        pair_values=2 * q,
        num_heads=heads,
        num_kv_heads=kv_heads,
        width=2 * q + 2 * kv,
        window=window,
    )


def gated(hidden: int, inner: int) -> FeedOutline:
    return FeedOutline(linear=3 * hidden * inner, width=3 * inner)


def routed(
    hidden: int,
    inner: int,
    num_experts: int,
    num_active: int,
    *,
    shared: int = 0,
    matrices: int = 3,
    biases: int = 0,
    has_router_bias: bool = False,
) -> FeedOutline:
    """`shared`: inner width of what every token passes beside its experts; `matrices`: 3 gated, 2 plain; `biases`:
    values of each expert's own."""
    return FeedOutline(
        linear=hidden * num_experts + matrices * hidden * shared,
        vectors=num_experts if has_router_bias else 0,
        width=3 * max(num_active * inner, shared),
        experts=num_experts * (matrices * hidden * inner + biases),
        num_experts=num_experts,
        num_active=num_active,
    )
