// Packed matrices as Python holds them.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "bindings/arrays.h"
#include "packing.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr size_t kWorthThreads = 1 << 19;  // bytes of a matrix that are packed sooner by several threads

void require_order(const int32_t* order, int cols) {
  for (int c = 0; c < cols; ++c)
    if (order[c] < 0 || order[c] >= cols) throw std::invalid_argument("an order of columns names one that is not there");
}

// A matrix in memory that belongs to `bytes`, which lives as long as the matrix does.
template <class Byte>
Matrix matrix_in(const Packing& packing, int rows, int cols, const Array<Byte, 1>& bytes) {
  Matrix m = matrix_layout(packing, rows, cols);
  auto* data = const_cast<uint8_t*>(bytes.data());
  if (bytes.shape(0) != m.num_bytes() || reinterpret_cast<uintptr_t>(data) % 64 != 0)
    throw std::invalid_argument("a packed matrix of this shape takes " + std::to_string(m.num_bytes()) +
                                " bytes at a multiple of 64");
  m.owner = std::shared_ptr<uint8_t[]>(data, [held = new Array<Byte, 1>(bytes)](uint8_t*) {
    nb::gil_scoped_acquire lock;
    delete held;
  });
  m.data = data;
  return m;
}

Matrix matrix_over(const std::string& kind, int rows, int cols, Array<const uint8_t, 1> packed) {
  Matrix m = matrix_in(packing_from_name(kind), rows, cols, packed);  // kernels only read
  if (m.is_ordered) require_order(m.order(), cols);
  return m;
}

Matrix pack(const std::string& kind_name, int rows, int cols, Array<const uint8_t, 2> source, int threads,
            const std::optional<Array<uint8_t, 1>>& to, const std::optional<Array<const int32_t, 1>>& order) {
  const Packing packing = packing_from_name(kind_name);
  const Kind kind = packing.kind;
  matrix_layout(packing, rows, cols);  // refuses impossible shapes before sizes are compared
  if (source.shape(0) != static_cast<size_t>(rows) || source.shape(1) != source_row_bytes(kind, cols))
    throw std::invalid_argument("the bytes given are not " + std::to_string(rows) + " rows of " +
                                std::to_string(source_row_bytes(kind, cols)) + " bytes");
  if (order.has_value() != packing.is_ordered || (order && order->shape(0) != static_cast<size_t>(cols)))
    throw std::invalid_argument("weights of kind " + kind_name + " and the order of their columns do not fit together");
  if (order) require_order(order->data(), cols);
  const Matrix m = to ? matrix_in(packing, rows, cols, *to) : empty_matrix(packing, rows, cols);
  if (order) std::memcpy(m.data + m.order_at(), order->data(), order->nbytes());
  nb::gil_scoped_release free;
  Pool pool(m.num_bytes() < kWorthThreads ? std::min(threads, 1) : threads);
  pool.run(m.panels, [&](int panel, int) { pack_panels(m, panel, panel + 1, source.data(), source.shape(1)); });
  return m;
}

void embed_rows(const Matrix& w, Array<const int64_t, 1> ids, float scale, Array<float, 2> out, const std::string& isa) {
  if (out.shape(0) != ids.shape(0) || out.shape(1) != static_cast<size_t>(w.cols))
    throw std::invalid_argument("out must be [ids, cols of the matrix]");
  for (size_t i = 0; i < ids.shape(0); ++i) {
    if (ids.data()[i] < 0 || ids.data()[i] >= w.rows) throw std::out_of_range("an id is outside the matrix");
    kernels_or_best(isa).embed(w, static_cast<int>(ids.data()[i]), scale, out.data() + i * w.cols);
  }
}

}  // namespace

Vector vector_of(const std::optional<FloatVector>& array, size_t size, const char* what) {
  if (!array) return {};
  if (array->shape(0) != size) throw std::invalid_argument(std::string(what) + " has the wrong length");
  return {array->data(), array->data() + size};
}

Linear linear_of(const Matrix& w, const std::optional<FloatVector>& bias) {
  return {w, vector_of(bias, static_cast<size_t>(w.rows), "a bias")};
}

void bind_matrices(nb::module_& m) {
  m.def("source_row_bytes", [](const std::string& kind, int cols) { return source_row_bytes(packing_from_name(kind).kind, cols); });
  m.def("embed_rows", &embed_rows, "matrix"_a, "ids"_a, "scale"_a, "out"_a.noconvert(), "isa"_a = "");
  nb::class_<Matrix>(m, "Matrix")
      .def_ro("rows", &Matrix::rows)
      .def_ro("cols", &Matrix::cols)
      .def_prop_ro("num_bytes", &Matrix::num_bytes);
  m.def("pack", &pack, "kind"_a, "rows"_a, "cols"_a, "source"_a, "threads"_a = 1,
        "to"_a.none().noconvert() = nb::none(), "order"_a.none() = nb::none());
  m.def("matrix_over", &matrix_over, "kind"_a, "rows"_a, "cols"_a, "packed"_a);
  m.def("packed_bytes", [](const std::string& kind, int rows, int cols) {
    return matrix_layout(packing_from_name(kind), rows, cols).num_bytes();
  }, "kind"_a, "rows"_a, "cols"_a);

  nb::class_<Linear>(m, "Linear").def("__init__", [](Linear* self, const Matrix& w, std::optional<FloatVector> bias,
                                                     int site, const std::vector<int>& borders, int rank) {
    if (!borders.empty() && (rank < 0 || static_cast<size_t>(rank) + 1 >= borders.size() || borders[0] != 0 ||
                             !std::is_sorted(borders.begin(), borders.end()) ||
                             borders[static_cast<size_t>(rank) + 1] - borders[static_cast<size_t>(rank)] != w.rows))
      throw std::invalid_argument("the borders of a cut matrix do not fit its rows");
    new (self) Linear(linear_of(w, bias));
    self->site = site;
    self->borders = borders;
    if (!borders.empty()) self->first = borders[static_cast<size_t>(rank)];
  }, "matrix"_a, "bias"_a.none(), "site"_a = -1, "borders"_a = std::vector<int>(), "rank"_a = 0);
}

}  // namespace tokenmill
