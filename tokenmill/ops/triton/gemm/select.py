"""Selection of the GEMM kernel: one ordered table for every product of activations with a weight matrix.

The first row that accepts a product is chosen. A row depends on `Product` only: the number of rows m, the matrix [n, k]
and its form, the GPU's capabilities and measured thresholds (`launch/capabilities.py`), and whether the product is
launched eagerly or captured into a graph. The answer is cached, so each product of a model is looked up once per number
of rows; `tokenmill doctor --kernels` prints the same answers without a GPU.

A row names its kernel by module and attribute, imported when the row is first chosen: Gluon takes 0.1 s to import, and
printing choices needs no Triton at all. The attribute is a `GemmKernel`:

    pick_config(product) → tile configuration
    launch(x, matrix, bias, config, dtype)                      epilogue "none"
    launch(x, matrix, bias, config, dtype, activation)          epilogue "gated"
    launch(x, matrix, bias, config, dtype, residual)            epilogue "add"

x are the activations in the form that the kernel multiplies: a tensor, or quantised rows (`Fp8Rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from tokenmill.ops.batch import Mode
from tokenmill.ops.triton.gemm.product import FP8_SQUARES, INTERLEAVE, Epilogue, GemmKernel, Product, WeightForm
from tokenmill.ops.triton.launch.capabilities import Capabilities

MIN_HOPPER_ROWS = 33  # more than two tiles of 16
MIN_BLOCKS_ROWS = 17
MAX_NORM_GEMV = 1 << 24  # most elements of a matrix for which norm and GEMV of a single row are fused
MAX_NORM_GEMV_COLUMNS = 8192


class GemmRow(NamedTuple):
    name: str
    accepts: Callable[[Product], bool]
    launch: str  # "module:attribute" under tokenmill.ops.triton
    why: str


@dataclass(frozen=True)
class Choice:
    row: GemmRow
    product: Product

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def why(self) -> str:
        return self.row.why

    @cached_property
    def kernel(self) -> GemmKernel:
        return load_kernel(self.row)

    @cached_property
    def config(self) -> Any:
        return self.kernel.pick_config(self.product)

    def run(self, x: Any, matrix: Any, bias: torch.Tensor | None, dtype: torch.dtype, *epilogue: Any) -> torch.Tensor:
        return self.kernel.launch(x, matrix, bias, self.config, dtype, *epilogue)


def load_kernel(row: GemmRow) -> GemmKernel:
    module, attribute = row.launch.split(":")
    found = getattr(import_module(f"tokenmill.ops.triton.{module}"), attribute)
    assert isinstance(found, GemmKernel)
    return found


def _is_wide(product: Product) -> bool:
    """Return whether there are dozens of rows in a captured step, with strides that are multiples of 16 bytes, as TMA
    requires. In eager mode, creating TMA descriptors takes the host longer than the product takes."""
    gpu, form = product.capabilities, product.form
    rows = MIN_HOPPER_ROWS <= product.m <= gpu.tuning.gemm_hopper_max_rows
    return gpu.has_gluon and product.mode == "captured" and rows and product.k * form.element_size % 16 == 0


def _takes_hopper_blocks(product: Product) -> bool:
    """Accept up to 64 rows: of a large matrix any number, of others more than 16. Also up to 256 rows, if there are so
    few programs that columns are split, or with any number of programs if cuBLAS does not support block scales."""
    gpu, m, n = product.capabilities, product.m, product.n
    if product.epilogue != "none" or product.mode != "captured" or not gpu.has_gluon:
        return False
    if m <= 64:
        return m >= MIN_BLOCKS_ROWS or n >= 128 * gpu.tuning.multiprocessors
    is_split = -(-n // 64) * -(-m // 128) <= gpu.tuning.multiprocessors
    return m <= 2 * gpu.tuning.gemm_hopper_max_rows and (is_split or not _takes_squares(product))


def _takes_squares(product: Product) -> bool:
    is_square = product.form == FP8_SQUARES[torch.bfloat16]
    return product.epilogue == "none" and is_square and product.capabilities.has_scaled_blocks


def _takes_hopper_int(product: Product) -> bool:
    tuning = product.capabilities.tuning
    rows = tuning.gemm_splitk_max_rows < product.m <= tuning.int_hopper_max_rows
    is_laid_out = product.form.interleave == INTERLEAVE and product.is_half
    return product.epilogue == "none" and rows and is_laid_out and product.capabilities.has_gluon


def _takes_hopper_fp4(product: Product) -> bool:
    gpu, is_bfloat16 = product.capabilities, product.form.dtype == torch.bfloat16
    has_kernel = gpu.has_gluon and is_bfloat16 and product.epilogue == "none"
    return has_kernel and product.m <= 2 * gpu.tuning.int_hopper_max_rows


def _takes_hopper_table(product: Product) -> bool:
    gpu, is_bfloat16 = product.capabilities, product.form.dtype == torch.bfloat16
    has_kernel = gpu.has_gluon and is_bfloat16 and product.epilogue == "none"
    return has_kernel and product.m <= gpu.tuning.table_hopper_max_rows


def _takes_splitk_int(product: Product) -> bool:
    tuning = product.capabilities.tuning
    return product.epilogue == "none" and product.m <= max(
        tuning.gemm_splitk_max_rows,
        tuning.int4_splitk_max_rows if product.form.bits == 4 else tuning.int8_splitk_max_rows,
    )


def _takes_gated(product: Product) -> bool:
    gpu = product.capabilities
    is_whole = product.k % 8 == product.n % 16 == 0
    return product.m >= gpu.tuning.gemm_gated_min_rows and _is_fusable(product) and is_whole and gpu.is_hopper


def _is_fusable(product: Product) -> bool:
    return product.is_half and not product.has_bias


PLAIN_ROWS = (
    GemmRow(
        "gated_gemm",
        lambda p: p.epilogue == "gated" and _takes_gated(p),
        "gemm.epilogues:GATED_GEMM",
        "many rows: the gated activation is fused",
    ),
    GemmRow(
        "cublas_add",
        lambda p: p.epilogue == "add" and p.m >= p.capabilities.tuning.gemm_add_min_rows and _is_fusable(p),
        "gemm.cublas:CUBLAS_ADD",
        "many rows: cuBLAS adds the residual stream",
    ),
    GemmRow(
        "gemv",
        lambda p: p.epilogue == "none" and p.m == 1 and p.is_half,
        "gemm.gemv:GEMV",
        "one row: bound by reading the matrix once",
    ),
    GemmRow(
        "splitk",
        lambda p: (
            p.epilogue == "none"
            and 1 < p.m <= p.capabilities.tuning.gemm_splitk_max_rows
            and p.is_half
            and p.k % 128 == 0
        ),
        "gemm.splitk:SPLITK",
        "few rows: columns are split until every multiprocessor has work",
    ),
    GemmRow(
        "hopper_gemm",
        lambda p: p.epilogue in ("none", "gated") and p.is_half and _is_wide(p),
        "gemm.hopper:HOPPER_GEMM",
        "dozens of rows in a graph: tiles are copied by TMA",
    ),
    GemmRow("cublas", lambda p: p.epilogue == "none", "gemm.cublas:CUBLAS", "any number of rows"),
)
FP8_ROWS = (
    GemmRow(
        "fp8_split",
        lambda p: p.epilogue == "none" and p.m <= p.capabilities.tuning.fp8_split_max_rows,
        "quant.gemm_fp8_split:FP8_SPLIT",
        "few rows: activations as two fp8 values each, as precise as bfloat16",
    ),
    GemmRow(
        "hopper_gemm_fp8",
        lambda p: p.epilogue in ("none", "gated") and _is_wide(p),
        "gemm.hopper:HOPPER_GEMM_FP8",
        "dozens of rows in a graph: tiles are copied by TMA",
    ),
    GemmRow(
        "cublas_fp8",
        lambda p: p.epilogue == "none",
        "gemm.cublas:CUBLAS_FP8",
        "any number of rows, quantised to one fp8 value",
    ),
)
FP8_BLOCKS_ROWS = (
    GemmRow(
        "hopper_gemm_fp8_blocks",
        _takes_hopper_blocks,
        "gemm.hopper:HOPPER_GEMM_FP8_BLOCKS",
        "dozens of rows in a graph: tiles are copied by TMA, sums of 128 columns times their scales",
    ),
    GemmRow(
        "fp8_blocks_split",
        lambda p: p.epilogue == "none" and p.m <= p.capabilities.tuning.fp8_split_max_rows,
        "quant.gemm_fp8_blocks:FP8_BLOCKS_SPLIT",
        "few rows: activations as two fp8 values each, sums of 128 columns times their scales",
    ),
    GemmRow(
        "cublas_fp8_squares",
        _takes_squares,
        "gemm.cublas:CUBLAS_FP8_SQUARES",
        "any number of rows, quantised to one fp8 value, one scale per 128 x 128 block of the matrix",
    ),
    GemmRow(
        "fp8_blocks",
        lambda p: p.epilogue == "none",
        "quant.gemm_fp8_blocks:FP8_BLOCKS",
        "any number of rows, quantised to one fp8 value, sums of 128 columns times their scales",
    ),
)
EXPAND_CUBLAS_ROW = GemmRow(
    "expand_cublas",
    lambda p: p.epilogue == "none",
    "gemm.cublas:EXPAND_CUBLAS",
    "many rows: the matrix is expanded in parts, then multiplied by cuBLAS",
)
FP4_ROWS = (
    GemmRow(
        "hopper_gemm_fp4",
        _takes_hopper_fp4,
        "quant.hopper_gemm_fp4:HOPPER_GEMM_FP4",
        "up to some hundred rows: 4-bit values are expanded in registers while Hopper's tensor cores multiply",
    ),
    GemmRow(
        "splitk_fp4",
        lambda p: p.epilogue == "none" and p.m <= p.capabilities.tuning.int4_splitk_max_rows,
        "quant.gemm_fp4:SPLITK_FP4",
        "few rows: 4-bit values are expanded in registers, columns are split",
    ),
    EXPAND_CUBLAS_ROW,
)
TABLE_ROWS = (
    GemmRow(
        "hopper_gemm_table",
        _takes_hopper_table,
        "quant.hopper_gemm_fp4:HOPPER_GEMM_TABLE",
        "up to some thousand rows: values are looked up in registers while Hopper's tensor cores multiply",
    ),
    GemmRow(
        "splitk_table",
        lambda p: p.epilogue == "none" and p.m <= p.capabilities.tuning.int4_splitk_max_rows,
        "quant.gemm_table:SPLITK_TABLE",
        "few rows: values are looked up in a table, columns are split",
    ),
    EXPAND_CUBLAS_ROW,
)
INT_ROWS = (
    GemmRow(
        "gemv_int4",
        lambda p: (
            p.epilogue == "none" and p.m == 1 and p.form.bits == 4 and p.form.interleave == INTERLEAVE and p.is_half
        ),
        "quant.gemv_int4:GEMV_INT4",
        "one row: two values per instruction, no tensor cores",
    ),
    GemmRow(
        "hopper_gemm_int",
        _takes_hopper_int,
        "quant.hopper_gemm_int:HOPPER_GEMM_INT",
        "up to some hundred rows: integers are expanded in registers while Hopper's tensor cores multiply",
    ),
    GemmRow(
        "splitk_int",
        _takes_splitk_int,
        "gemm.splitk:SPLITK_INT",
        "few rows: integers are expanded in registers, columns are split",
    ),
    EXPAND_CUBLAS_ROW,
)
PRODUCTS: dict[str, tuple[GemmRow, ...]] = {
    "plain": PLAIN_ROWS,
    "fp8": FP8_ROWS,
    "fp8_blocks": FP8_BLOCKS_ROWS,
    "fp4": FP4_ROWS,
    "table": TABLE_ROWS,
    "int": INT_ROWS,
}


def takes_norm_gemv(n: int, k: int, form: WeightForm) -> bool:
    """Return whether an RMS norm and the product of a single row are fused in one kernel (`elementwise/norm.py`)."""
    is_small = n * k <= MAX_NORM_GEMV and k <= MAX_NORM_GEMV_COLUMNS
    return is_small and form.kind == "plain" and form.dtype != torch.float32


@lru_cache(maxsize=16384)
def choose(
    m: int,
    n: int,
    k: int,
    form: WeightForm,
    capabilities: Capabilities,
    mode: Mode = "eager",
    epilogue: Epilogue = "none",
    has_bias: bool = False,
) -> Choice | None:
    """Return the first row that accepts a product of m > 0 rows; None if no kernel has the epilogue, which is then a
    separate op after the product."""
    product = Product(m, n, k, form, capabilities, mode, epilogue, has_bias)
    return next((Choice(row, product) for row in PRODUCTS[form.kind] if row.accepts(product)), None)


def choices(
    n: int,
    k: int,
    form: WeightForm,
    capabilities: Capabilities,
    mode: Mode,
    epilogue: Epilogue = "none",
    has_bias: bool = False,
    max_rows: int = 4096,
) -> Iterator[tuple[int, Choice | None]]:
    """Return (number of rows, kernel) for each number of rows from 1 to `max_rows` at which the chosen kernel
    changes."""
    before: str | None = ""
    for m in range(1, max_rows + 1):
        choice = choose(m, n, k, form, capabilities, mode, epilogue, has_bias)
        name = None if choice is None else choice.name
        if name != before:
            yield m, choice
        before = name
