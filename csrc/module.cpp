// The Python side of the kernels: packed matrices and the decoder. Memory comes as arrays of any library (DLPack);
// every size is checked here or in Decoder::check before a pointer is used. Long calls release the interpreter lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "decoder.h"
#include "packing.h"
#include "step_rows.h"

#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace tokenmill {
namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
using FloatVector = Array<const float, 1>;

constexpr float kNever = std::numeric_limits<float>::infinity();
constexpr size_t kWorthThreads = 1 << 19;  // bytes of a matrix that are packed sooner by several threads

const Kernels& kernels_or_best(const std::string& name) {
  if (name.empty()) return best_kernels();
  const Kernels* found = kernels_named(name);
  if (found == nullptr) throw std::invalid_argument("this processor can't run the kernels for " + name);
  return *found;
}

// A matrix in memory that belongs to `bytes`, which lives as long as the matrix does.
template <class Byte>
Matrix matrix_in(Kind kind, int rows, int cols, const Array<Byte, 1>& bytes) {
  Matrix m = matrix_layout(kind, rows, cols);
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
  return matrix_in(kind_from_name(kind), rows, cols, packed);  // kernels only read
}

Matrix pack(const std::string& kind_name, int rows, int cols, Array<const uint8_t, 2> source, int threads,
            const std::optional<Array<uint8_t, 1>>& to) {
  const Kind kind = kind_from_name(kind_name);
  matrix_layout(kind, rows, cols);  // refuses impossible shapes before sizes are compared
  if (source.shape(0) != static_cast<size_t>(rows) || source.shape(1) != source_row_bytes(kind, cols))
    throw std::invalid_argument("the bytes given are not " + std::to_string(rows) + " rows of " +
                                std::to_string(source_row_bytes(kind, cols)) + " bytes");
  if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be between 1 and 1024");
  const Matrix m = to ? matrix_in(kind, rows, cols, *to) : empty_matrix(kind, rows, cols);
  nb::gil_scoped_release free;
  if (m.num_bytes() < kWorthThreads) threads = 1;
  Pool pool(threads);
  pool.run(m.panels, [&](int panel, int) { pack_panels(m, panel, panel + 1, source.data(), source.shape(1)); });
  return m;
}

Vector vector_of(const std::optional<FloatVector>& array, size_t size, const char* what) {
  if (!array) return {};
  if (array->shape(0) != size) throw std::invalid_argument(std::string(what) + " has the wrong length");
  return {array->data(), array->data() + size};
}

Linear linear_of(const Matrix& w, const std::optional<FloatVector>& bias) {
  return {w, vector_of(bias, static_cast<size_t>(w.rows), "a bias")};
}

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::Silu;
  if (name == "gelu") return Activation::Gelu;
  if (name == "gelu_tanh") return Activation::GeluTanh;
  throw std::invalid_argument("unknown activation " + name);
}

Store store_of(const AnyArray& array) {
  const nb::dlpack::dtype type = array.dtype();
  if (type == nb::dtype<float>()) return Store::F32;
  if (type.bits == 16 && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) return Store::F16;
  if (type.bits == 16 && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat)) return Store::BF16;
  if (type == nb::dtype<int8_t>()) return Store::I8;
  throw std::invalid_argument("the KV cache must be float32, float16, bfloat16 or int8");
}

using Scales = std::optional<Array<float, 3>>;

// A decoder as Python holds it: with the inputs of the present step, and the time spent in kernels.
class HeldDecoder : public Decoder {
 public:
  using Decoder::Decoder;
  StepRows rows;
  std::vector<float> states;  // [wanted][hidden]
  std::vector<float> logit_lines;  // [wanted][vocab]
  std::vector<DrawRoom> draw_rooms;  // one a thread
  double kernel_s = 0.0;

  template <class Work>
  void timed(const Work& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    kernel_s += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
};

void bind_cache(HeldDecoder& decoder, int layer, AnyArray keys, AnyArray values, Scales key_scales, Scales value_scales) {
  if (keys.ndim() != 4 || values.ndim() != 4 || store_of(keys) != store_of(values))
    throw std::invalid_argument("keys and values must be [blocks, kv heads, block size, head dim] of one type");
  for (size_t i = 0; i < 4; ++i)
    if (keys.shape(i) != values.shape(i)) throw std::invalid_argument("keys and values differ in shape");
  PagedCache cache{keys.data(), values.data()};
  cache.store = store_of(keys);
  const bool is_scaled = cache.store == Store::I8;
  for (const Scales* scales : {&key_scales, &value_scales}) {
    if (scales->has_value() != is_scaled) throw std::invalid_argument("an int8 cache has scales, no other one has");
    for (size_t i = 0; is_scaled && i < 3; ++i)
      if ((*scales)->shape(i) != keys.shape(i)) throw std::invalid_argument("keys and their scales differ in shape");
  }
  if (is_scaled) {
    cache.key_scales = key_scales->data();
    cache.value_scales = value_scales->data();
  }
  cache.kv_heads = static_cast<int>(keys.shape(1));
  cache.block_size = static_cast<int>(keys.shape(2));
  cache.head_dim = static_cast<int>(keys.shape(3));
  decoder.set_cache(layer, cache, static_cast<int>(keys.shape(0)));
}

void forward(HeldDecoder& decoder, Array<const int64_t, 1> token_ids, Array<const int64_t, 1> positions,
             Array<const int32_t, 1> query_starts, Array<const int32_t, 1> context_lens,
             const std::vector<Array<const int32_t, 2>>& block_tables, const std::vector<Array<const int64_t, 1>>& slots,
             Array<const int64_t, 1> logit_rows, Array<float, 2> hidden) {
  BatchView batch;
  batch.tokens = static_cast<int>(token_ids.shape(0));
  batch.rows = static_cast<int>(context_lens.shape(0));
  batch.wanted = static_cast<int>(logit_rows.shape(0));
  batch.token_ids = token_ids.data();
  batch.positions = positions.data();
  batch.query_starts = query_starts.data();
  batch.context_lens = context_lens.data();
  batch.logit_rows = logit_rows.data();
  bool fits = positions.shape(0) == token_ids.shape(0) && query_starts.shape(0) == context_lens.shape(0) + 1 &&
              block_tables.size() == slots.size() && hidden.shape(0) == logit_rows.shape(0) &&
              hidden.shape(1) == static_cast<size_t>(decoder.hidden());
  for (size_t g = 0; fits && g < slots.size(); ++g) {
    fits = block_tables[g].shape(0) == context_lens.shape(0) && slots[g].shape(0) == token_ids.shape(0);
    batch.groups.push_back({block_tables[g].data(), static_cast<int>(block_tables[g].shape(1)), slots[g].data()});
  }
  if (!fits) throw std::invalid_argument("the arrays of the batch do not fit together");
  nb::gil_scoped_release free;
  decoder.timed([&] { decoder.forward(batch, hidden.data()); });
}

void logits(HeldDecoder& decoder, Array<const float, 2> hidden, Array<float, 2> out) {
  if (hidden.shape(1) != static_cast<size_t>(decoder.hidden()) || out.shape(0) != hidden.shape(0) ||
      out.shape(1) != static_cast<size_t>(decoder.vocab()))
    throw std::invalid_argument("hidden must be [rows, hidden] and out [rows, vocab]");
  nb::gil_scoped_release free;
  decoder.timed([&] { decoder.logits(hidden.data(), static_cast<int>(hidden.shape(0)), out.data()); });
}

void best_logits(HeldDecoder& decoder, Array<const float, 2> hidden, Array<int64_t, 1> places, Array<float, 1> values) {
  if (hidden.shape(1) != static_cast<size_t>(decoder.hidden()) || places.shape(0) != hidden.shape(0) ||
      values.shape(0) != hidden.shape(0))
    throw std::invalid_argument("hidden must be [rows, hidden], places and values [rows]");
  nb::gil_scoped_release free;
  decoder.timed([&] {
    decoder.best_logits(hidden.data(), static_cast<int>(hidden.shape(0)), places.data(), values.data());
  });
}

// ── the same for rows as they are planned ──

using Numbers = std::vector<int64_t>;
using Tables = Array<const int32_t, 3>;

const BatchView& lay_out(HeldDecoder& decoder, const Numbers& rows, const Numbers& starts,
                         const std::vector<Numbers>& tokens, const Numbers& wanted, const Tables& tables,
                         int block_size) {
  if (block_size < 1) throw std::invalid_argument("a block holds at least one token");
  const BatchView& batch = decoder.rows.lay_out(
      {tables.data(), tables.shape(0), tables.shape(1), tables.shape(2), block_size}, rows, starts, tokens, wanted);
  decoder.states.resize(static_cast<size_t>(batch.wanted) * static_cast<size_t>(decoder.hidden()));
  return batch;
}

Numbers best_next(HeldDecoder& decoder, const Numbers& rows, const Numbers& starts, const std::vector<Numbers>& tokens,
                  const Numbers& wanted, const Tables& tables, int block_size) {
  const BatchView& batch = lay_out(decoder, rows, starts, tokens, wanted, tables, block_size);
  Numbers places(static_cast<size_t>(batch.wanted));
  std::vector<float> values(static_cast<size_t>(batch.wanted));
  nb::gil_scoped_release free;
  decoder.timed([&] {
    decoder.forward(batch, decoder.states.data());
    decoder.best_logits(decoder.states.data(), batch.wanted, places.data(), values.data());
  });
  for (size_t i = 0; i < places.size(); ++i)
    if (!std::isfinite(values[i])) places[i] = -1;
  return places;
}

void logits_next(HeldDecoder& decoder, const Numbers& rows, const Numbers& starts, const std::vector<Numbers>& tokens,
                 const Numbers& wanted, const Tables& tables, int block_size, Array<float, 2> out) {
  const BatchView& batch = lay_out(decoder, rows, starts, tokens, wanted, tables, block_size);
  if (out.shape(0) != static_cast<size_t>(batch.wanted) || out.shape(1) != static_cast<size_t>(decoder.vocab()))
    throw std::invalid_argument("out must be [wanted tokens, vocab]");
  nb::gil_scoped_release free;
  decoder.timed([&] {
    decoder.forward(batch, decoder.states.data());
    decoder.logits(decoder.states.data(), batch.wanted, out.data());
  });
}

// ── draws: tokenmill/sampling/native_draws.py ──

// One entry a line of the logits.
struct Draws {
  const std::vector<float>& temperatures;
  const Numbers& top_ks;
  const std::vector<double>&top_ps, &min_ps, &uniforms;
  const std::vector<bool>& takes_best;

  void check(size_t count) const {
    if (temperatures.size() != count || top_ks.size() != count || top_ps.size() != count || min_ps.size() != count ||
        uniforms.size() != count || takes_best.size() != count)
      throw std::invalid_argument("the knobs are not as many as the lines");
  }
  DrawKnobs knobs(size_t i) const {
    return {temperatures[i], top_ks[i], top_ps[i], min_ps[i], uniforms[i], takes_best[i]};
  }
};

// Tokens drawn from the lines of the logits that are named, -1 where the highest logit is no finite number.
Numbers draw_rows(Array<const float, 2> logits, const Numbers& lines, const std::vector<float>& temperatures,
                  const Numbers& top_ks, const std::vector<double>& top_ps, const std::vector<double>& min_ps,
                  const std::vector<double>& uniforms, const std::vector<bool>& takes_best, const std::string& isa) {
  const Draws draws{temperatures, top_ks, top_ps, min_ps, uniforms, takes_best};
  draws.check(lines.size());
  for (const int64_t line : lines)
    if (line < 0 || static_cast<size_t>(line) >= logits.shape(0)) throw std::out_of_range("there is no such line");
  const Kernels& kernels = kernels_or_best(isa);
  Numbers tokens(lines.size());
  DrawRoom room;
  nb::gil_scoped_release free;
  for (size_t i = 0; i < lines.size(); ++i)
    tokens[i] = kernels.draw_token(logits.data() + static_cast<size_t>(lines[i]) * logits.shape(1),
                                   static_cast<int>(logits.shape(1)), draws.knobs(i), room);
  return tokens;
}

constexpr size_t kLinesAtOnce = 64;  // whose logits are held in memory

// The whole of a step that ends with draws; drawing is the host's time, not the kernels'.
Numbers draw_next(HeldDecoder& decoder, const Numbers& rows, const Numbers& starts, const std::vector<Numbers>& tokens,
                  const Numbers& wanted, const Tables& tables, int block_size, const std::vector<float>& temperatures,
                  const Numbers& top_ks, const std::vector<double>& top_ps, const std::vector<double>& min_ps,
                  const std::vector<double>& uniforms, const std::vector<bool>& takes_best) {
  const BatchView& batch = lay_out(decoder, rows, starts, tokens, wanted, tables, block_size);
  const size_t count = static_cast<size_t>(batch.wanted), vocab = static_cast<size_t>(decoder.vocab());
  const Draws draws{temperatures, top_ks, top_ps, min_ps, uniforms, takes_best};
  draws.check(count);
  decoder.logit_lines.resize(std::max(decoder.logit_lines.size(), std::min(count, kLinesAtOnce) * vocab));
  decoder.draw_rooms.resize(static_cast<size_t>(decoder.pool().threads()));
  Numbers drawn(count);
  nb::gil_scoped_release free;
  decoder.timed([&] { decoder.forward(batch, decoder.states.data()); });
  const Kernels& kernels = best_kernels();  // as everywhere else where tokens are drawn
  for (size_t first = 0; first < count; first += kLinesAtOnce) {
    const int lines = static_cast<int>(std::min(count - first, kLinesAtOnce));
    const float* states = decoder.states.data() + first * static_cast<size_t>(decoder.hidden());
    decoder.timed([&] { decoder.logits(states, lines, decoder.logit_lines.data()); });
    decoder.pool().run(lines, [&](int line, int thread) {
      const size_t at = static_cast<size_t>(line);
      drawn[first + at] =
          kernels.draw_token(decoder.logit_lines.data() + at * vocab, static_cast<int>(vocab), draws.knobs(first + at),
                             decoder.draw_rooms[static_cast<size_t>(thread)]);
    });
  }
  return drawn;
}

void softmax_rows(Array<const float, 2> logits, Array<float, 2> out, const std::string& isa) {
  if (out.shape(0) != logits.shape(0) || out.shape(1) != logits.shape(1))
    throw std::invalid_argument("logits and out differ in shape");
  const Kernels& kernels = kernels_or_best(isa);
  nb::gil_scoped_release free;
  for (size_t i = 0; i < logits.shape(0); ++i)
    kernels.softmax_row(logits.data() + i * logits.shape(1), static_cast<int>(logits.shape(1)),
                        out.data() + i * logits.shape(1));
}

// ── single kernels, for tests and benchmarks ──

class Bench {  // a matrix product with its own pool, without a model around it
 public:
  Bench(int threads, const std::string& isa, float fine_above)
      : kernels_(kernels_or_best(isa)), pool_(threads), runner_(pool_, kernels_), fine_above_(fine_above) {}

  void linear(const Matrix& w, const std::optional<FloatVector>& bias, Array<const float, 2> x, Array<float, 2> out) {
    if (x.shape(1) != static_cast<size_t>(w.cols) || out.shape(0) != x.shape(0) ||
        out.shape(1) != static_cast<size_t>(w.rows))
      throw std::invalid_argument("x must be [rows, cols of the matrix] and out [rows, rows of the matrix]");
    const Linear weight = linear_of(w, bias);
    nb::gil_scoped_release free;
    take(w, x.data(), static_cast<int>(x.shape(0)));
    const Gemm gemm{&weight, nullptr, in_.view(), Gemm::Mode::Store, out.data(), static_cast<size_t>(w.rows)};
    runner_.run(&gemm, 1);
  }

  uint64_t rescues() const { return pool_.rescues(); }

  // Best and median seconds of `repeats` products by fresh copies of `w` as long as there are some (cold memory).
  std::vector<double> time_linear(const std::vector<const Matrix*>& ws, int rows, int repeats) {
    nb::gil_scoped_release free;
    std::vector<float> x(static_cast<size_t>(rows) * ws[0]->cols, 0.5f), out(static_cast<size_t>(rows) * ws[0]->rows);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>((i * 2654435761u >> 16) % 2001) / 1000.0f - 1.0f;
    take(*ws[0], x.data(), rows);
    std::vector<Linear> weights;
    for (const Matrix* w : ws) weights.push_back({*w, {}});
    std::vector<double> seconds;
    for (int i = 0; i < repeats; ++i) {
      const Gemm gemm{&weights[static_cast<size_t>(i) % weights.size()], nullptr, in_.view(), Gemm::Mode::Store,
                      out.data(), static_cast<size_t>(ws[0]->rows)};
      const auto start = std::chrono::steady_clock::now();
      runner_.run(&gemm, 1);
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
  }

  // Seconds to read `bytes` of memory with all threads, `repeats` times.
  std::vector<double> time_read(size_t bytes, int repeats) {
    nb::gil_scoped_release free;
    const std::shared_ptr<uint8_t[]> memory = allocate_pages(bytes);
    const auto* words = reinterpret_cast<const uint64_t*>(memory.get());
    std::vector<double> seconds;
    const size_t step = 1 << 14;  // words of a piece
    std::atomic<uint64_t> sink{0};
    for (int i = 0; i < repeats; ++i) {
      const auto start = std::chrono::steady_clock::now();
      pool_.run(static_cast<int>(bytes / 8 / step), [&](int piece, int) {
        const uint64_t* p = words + static_cast<size_t>(piece) * step;
        uint64_t sums[8] = {};
        for (size_t k = 0; k < step; k += 8) {
          __builtin_prefetch(p + k + 256);
          for (size_t lane = 0; lane < 8; ++lane) sums[lane] += p[k + lane];
        }
        sink.fetch_add(sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7]);
      });
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
  }

 private:
  void take(const Matrix& w, const float* x, int rows) {
    in_.prepare(rows, w.cols, kernels_, {is_quantised(w.kind), !is_quantised(w.kind), fine_above_});
    pool_.run(rows, [&](int r, int) { in_.put_row(r, x + static_cast<size_t>(r) * w.cols, kernels_); });
    if (in_.needs_settling()) pool_.run(in_.quant().tiles(), [&](int t, int) { in_.settle(t); });
  }

  const Kernels& kernels_;
  Pool pool_;
  Runner runner_;
  float fine_above_;
  Activations in_;
};

// Loads a shared library with the interpreter free to go on: importing a module that needs it then finds it there.
bool load_library(const std::string& path) {
#if defined(__linux__)
  nb::gil_scoped_release free;
  return dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL) != nullptr;
#else
  return path.empty();
#endif
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

NB_MODULE(_native, m) {
  m.doc() = "Native CPU kernels; see tokenmill/ops/cpu.";
  m.def("instruction_set", [] { return std::string(best_kernels().name); });
  m.def("instruction_sets", &runnable_kernels);
  m.def("source_row_bytes", [](const std::string& kind, int cols) { return source_row_bytes(kind_from_name(kind), cols); });
  m.def("load_library", &load_library, "path"_a);
  m.def("embed_rows", &embed_rows, "matrix"_a, "ids"_a, "scale"_a, "out"_a, "isa"_a = "");

  m.def("softmax_rows", &softmax_rows, "logits"_a, "out"_a, "isa"_a = "");
  m.def("draw_rows", &draw_rows, "logits"_a, "lines"_a, "temperatures"_a, "top_ks"_a, "top_ps"_a, "min_ps"_a,
        "uniforms"_a, "takes_best"_a, "isa"_a = "");

  nb::class_<Matrix>(m, "Matrix")
      .def_ro("rows", &Matrix::rows)
      .def_ro("cols", &Matrix::cols)
      .def_prop_ro("num_bytes", &Matrix::num_bytes);
  m.def("pack", &pack, "kind"_a, "rows"_a, "cols"_a, "source"_a, "threads"_a = 1, "to"_a.none() = nb::none());
  m.def("matrix_over", &matrix_over, "kind"_a, "rows"_a, "cols"_a, "packed"_a);
  m.def("packed_bytes", [](const std::string& kind, int rows, int cols) {
    return matrix_layout(kind_from_name(kind), rows, cols).num_bytes();
  }, "kind"_a, "rows"_a, "cols"_a);

  nb::class_<Bench>(m, "Bench")
      .def(nb::init<int, const std::string&, float>(), "threads"_a, "isa"_a = "", "fine_above"_a = kNever)
      .def("linear", &Bench::linear, "matrix"_a, "bias"_a.none(), "x"_a, "out"_a)
      .def("time_linear", &Bench::time_linear, "matrices"_a, "rows"_a, "repeats"_a)
      .def("time_read", &Bench::time_read, "num_bytes"_a, "repeats"_a)
      .def_prop_ro("rescues", &Bench::rescues);

  nb::class_<Linear>(m, "Linear").def("__init__", [](Linear* self, const Matrix& w, std::optional<FloatVector> bias) {
    new (self) Linear(linear_of(w, bias));
  }, "matrix"_a, "bias"_a.none());

  nb::class_<Mlp>(m, "Mlp").def("__init__", [](Mlp* self, const Linear& gate, const Linear& up, const Linear& down,
                                               const std::string& activation) {
    if (gate.w.rows != up.w.rows || gate.w.cols != up.w.cols || down.w.cols != gate.w.rows)
      throw std::invalid_argument("gate, up and down do not fit together");
    new (self) Mlp{gate, up, down, activation_named(activation)};
  }, "gate"_a, "up"_a, "down"_a, "activation"_a);

  nb::class_<Moe>(m, "Moe").def("__init__", [](Moe* self, const Linear& router, std::vector<Mlp> experts, int num_active,
                                               bool renormalize, std::optional<Mlp> shared) {
    if (router.w.rows != static_cast<int>(experts.size()) || num_active < 1 || num_active > router.w.rows)
      throw std::invalid_argument("the router does not fit the experts");
    new (self) Moe{router, std::move(experts), num_active, renormalize, std::move(shared)};
  }, "router"_a, "experts"_a, "num_active"_a, "renormalize"_a, "shared"_a.none());

  nb::class_<HeldDecoder>(m, "Decoder")
      .def("__init__", [](HeldDecoder* self, int hidden, int vocab, float eps, float embedding_scale, float logit_softcap,
                          int threads, float fine_above, const std::string& isa) {
        if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be between 1 and 1024");
        if (!(fine_above >= 0)) throw std::invalid_argument("fine_above must not be negative");
        new (self) HeldDecoder(hidden, vocab, eps, embedding_scale, logit_softcap, threads, fine_above,
                               kernels_or_best(isa));
      }, "hidden"_a, "vocab"_a, "eps"_a, "embedding_scale"_a, "logit_softcap"_a, "threads"_a, "fine_above"_a = kNever,
           "isa"_a = "")
      .def("add_rope", [](HeldDecoder& self, Array<const float, 2> cos, Array<const float, 2> sin) {
        if (cos.shape(0) != sin.shape(0) || cos.shape(1) != sin.shape(1))
          throw std::invalid_argument("cos and sin differ in shape");
        RopeTable table;
        table.positions = static_cast<int>(cos.shape(0));
        table.half = static_cast<int>(cos.shape(1));
        table.cos.assign(cos.data(), cos.data() + cos.size());
        table.sin.assign(sin.data(), sin.data() + sin.size());
        return self.add_rope(std::move(table));
      }, "cos"_a, "sin"_a)
      .def("add_layer", [](HeldDecoder& self, FloatVector attn_norm, FloatVector mlp_norm,
                           std::optional<FloatVector> attn_post_norm, std::optional<FloatVector> mlp_post_norm,
                           const Linear& q, const Linear& k, const Linear& v, const Linear& o,
                           std::optional<FloatVector> q_norm, std::optional<FloatVector> k_norm,
                           std::optional<FloatVector> sinks, int heads, int kv_heads, int head_dim, float scale,
                           int window, float softcap, int rope, int group, std::optional<Mlp> mlp,
                           std::optional<Moe> moe) {
        Layer layer;
        const size_t hidden = static_cast<size_t>(self.hidden());
        layer.attn_norm = vector_of(attn_norm, hidden, "attn_norm");
        layer.mlp_norm = vector_of(mlp_norm, hidden, "mlp_norm");
        layer.attn_post_norm = vector_of(attn_post_norm, hidden, "attn_post_norm");
        layer.mlp_post_norm = vector_of(mlp_post_norm, hidden, "mlp_post_norm");
        layer.q_norm = vector_of(q_norm, static_cast<size_t>(head_dim), "q_norm");
        layer.k_norm = vector_of(k_norm, static_cast<size_t>(head_dim), "k_norm");
        layer.sinks = vector_of(sinks, static_cast<size_t>(heads), "sinks");
        layer.q = q;
        layer.k = k;
        layer.v = v;
        layer.o = o;
        layer.attention.heads = heads;
        layer.attention.cache.kv_heads = kv_heads;
        layer.attention.cache.head_dim = head_dim;
        layer.attention.scale = scale;
        layer.attention.window = window;
        layer.attention.softcap = softcap;
        layer.rope = rope;
        layer.group = group;
        layer.mlp = std::move(mlp);
        layer.moe = std::move(moe);
        self.add_layer(std::move(layer));
      }, "attn_norm"_a, "mlp_norm"_a, "attn_post_norm"_a.none(), "mlp_post_norm"_a.none(), "q"_a, "k"_a, "v"_a, "o"_a,
           "q_norm"_a.none(), "k_norm"_a.none(), "sinks"_a.none(), "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a,
           "window"_a, "softcap"_a, "rope"_a, "group"_a, "mlp"_a.none(), "moe"_a.none())
      .def("set_embedding", &HeldDecoder::set_embedding, "embedding"_a)
      .def("set_head", &HeldDecoder::set_head, "head"_a)
      .def("set_final_norm", [](HeldDecoder& self, FloatVector weight) {
        self.set_final_norm(vector_of(weight, static_cast<size_t>(self.hidden()), "final_norm"));
      }, "weight"_a)
      .def("bind_cache", &bind_cache, "layer"_a, "keys"_a, "values"_a, "key_scales"_a.none() = nb::none(),
           "value_scales"_a.none() = nb::none())
      .def("forward", &forward, "token_ids"_a, "positions"_a, "query_starts"_a, "context_lens"_a, "block_tables"_a,
           "slots"_a, "logit_rows"_a, "hidden"_a)
      .def("logits", &logits, "hidden"_a, "out"_a)
      .def("best_logits", &best_logits, "hidden"_a, "places"_a, "values"_a)
      .def("best_next", &best_next, "rows"_a, "starts"_a, "tokens"_a, "wanted"_a, "tables"_a, "block_size"_a)
      .def("logits_next", &logits_next, "rows"_a, "starts"_a, "tokens"_a, "wanted"_a, "tables"_a, "block_size"_a, "out"_a)
      .def("draw_next", &draw_next, "rows"_a, "starts"_a, "tokens"_a, "wanted"_a, "tables"_a, "block_size"_a,
           "temperatures"_a, "top_ks"_a, "top_ps"_a, "min_ps"_a, "uniforms"_a, "takes_best"_a)
      .def_ro("kernel_s", &HeldDecoder::kernel_s)
      .def_prop_ro("weight_bytes", &HeldDecoder::weight_bytes)
      .def_prop_ro("instruction_set", [](const HeldDecoder& d) { return std::string(d.kernels().name); });
}

}  // namespace tokenmill
