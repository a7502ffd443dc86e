"""Models with several residual streams, as data: what a layer reads from them, and how its result updates all of them.

AltUp (Gemma 3n). Only the first stream goes through a layer; the others are predicted and corrected:

    c = tanh(router(norm(x) / hidden))                      one number per stream and token
    predict   p_i = h_i + Σ_j P(c of h_0)_ij h_j            P and K are linear in c
    layer     y = layer(p_0)
    correct   h_i = p_i + (1 + K(c of y)_i) (y - p_0)       the layer's own token embedding is added to all but h_0

Inside the layer a low-rank branch (LAuReL) runs in parallel with attention:
(x + attention + n + norm(right(left(n)))) / √2, with n the normed x. The streams start as projections of the embedding,
scaled to its length, and are projected and averaged in the same way at the end.

Hyper-connections (DeepSeek V4). Attention and MLP each read a mixture of the streams and write to all of them:

    a, b, M = functions of the normed streams               one number per stream each, and a matrix [streams, streams]
    x = Σ_i a_i h_i          y = attention or MLP of x      h_i = b_i y + Σ_j M_ji h_j

M is made doubly stochastic by alternately dividing its rows and columns by their sums (Sinkhorn). The streams start as
copies of the embedding and are combined by one more mixture at the end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AltUp:
    num_streams: int
    branch_rank: int  # of the branch parallel to attention
    has_output_scale: bool = True  # the first stream is scaled by a vector before it gates the layer's own embedding


@dataclass(frozen=True)
class HyperConnections:
    num_streams: int
    num_rounds: int  # Sinkhorn iterations
    eps: float = 1e-6
    norm_eps: float = 1e-6

    @property
    def num_coefficients(self) -> int:
        return (2 + self.num_streams) * self.num_streams


Streams = AltUp | HyperConnections
