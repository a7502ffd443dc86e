"""Several residual streams, as data: what a layer reads of them, and how its result reaches all of them.

AltUp (Gemma 3n). Only the first stream goes through a layer; the others are predicted and corrected:

    c = tanh(router(norm(x) / hidden))                      a number a stream and token
    predict   p_i = h_i + Σ_j P(c of h_0)_ij h_j            P and K are linear in c
    layer     y = layer(p_0)
    correct   h_i = p_i + (1 + K(c of y)_i) (y - p_0)       the layer's own embedding of a token goes to all but h_0

Inside the layer a low-rank branch (LAuReL) stands beside attention: (x + attention + n + norm(right(left(n)))) / √2,
with n the normed x. The streams begin as projections of the embedding, made as long as it is, and end likewise in a
mean.

Hyper-connections (DeepSeek V4). Attention and MLP each read a mixture of the streams and write to all of them:

    a, b, M = functions of the normed streams               a number a stream each, and a matrix [streams, streams]
    x = Σ_i a_i h_i          y = attention or MLP of x      h_i = b_i y + Σ_j M_ji h_j

M is made doubly stochastic by dividing its rows and columns by their sums in turns (Sinkhorn). The streams begin as
copies of the embedding and end in one more mixture.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AltUp:
    num_streams: int
    branch_rank: int  # of the branch beside attention
    has_output_scale: bool = True  # what gates the layer's own embedding is the first stream times a vector


@dataclass(frozen=True)
class HyperConnections:
    num_streams: int
    num_rounds: int  # of dividing by sums
    eps: float = 1e-6
    norm_eps: float = 1e-6

    @property
    def num_coefficients(self) -> int:
        return (2 + self.num_streams) * self.num_streams


Streams = AltUp | HyperConnections
