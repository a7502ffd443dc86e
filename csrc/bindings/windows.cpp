// Windows (shared memory of ranks) for Python: between threads, or between processes that map the same memory file.
#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "bindings/arrays.h"
#include "window.h"

namespace tokenmill {
namespace {

std::shared_ptr<Window> window_over(std::shared_ptr<void> memory, int rank, int size, size_t room_bytes) {
  auto* bytes = static_cast<uint8_t*>(memory.get());
  return std::make_shared<Window>(bytes, std::move(memory), rank, size, room_bytes);
}

std::vector<std::shared_ptr<Window>> thread_windows(int size, size_t room_bytes) {
  std::vector<std::shared_ptr<Window>> made;
  const std::shared_ptr<void> memory = window_memory(size, room_bytes);
  for (int rank = 0; rank < size; ++rank) made.push_back(window_over(memory, rank, size, room_bytes));
  return made;
}

// Gathers all ranks' bytes in `out`, concatenated; `sizes` [ranks] are the bytes of each rank.
void all_gather(Window& window, Array<const uint8_t, 1> own, Array<uint8_t, 1> out, const std::vector<size_t>& sizes) {
  const size_t ranks = static_cast<size_t>(window.size()), rank = static_cast<size_t>(window.rank());
  if (sizes.size() != ranks || own.shape(0) != sizes[rank] ||
      out.shape(0) != std::accumulate(sizes.begin(), sizes.end(), size_t{0}))
    throw std::invalid_argument("the parts of ranks do not fit together");
  nb::gil_scoped_release free;
  const size_t most = *std::max_element(sizes.begin(), sizes.end()), room = window.room_bytes();
  for (size_t begin = 0; begin < most; begin += room) {
    const auto left = [&](size_t r) { return std::min(room, sizes[r] - std::min(begin, sizes[r])); };
    std::copy_n(own.data() + std::min(begin, sizes[rank]), left(rank), window.own());
    window.meet();
    uint8_t* to = out.data();
    for (size_t r = 0; r < ranks; to += sizes[r++])
      std::copy_n(window.of(static_cast<int>(r)), left(r), to + std::min(begin, sizes[r]));
    window.next_turn();
  }
}

}  // namespace

void bind_windows(nb::module_& m) {
  nb::exception<PeersGone>(m, "PeersGone", PyExc_RuntimeError);
  nb::class_<Window>(m, "Window")
      .def_prop_ro("rank", &Window::rank)
      .def_prop_ro("size", &Window::size)
      .def_prop_ro("is_aborted", &Window::is_aborted)
      .def("abort", &Window::abort)
      .def("set_limit_s", &Window::set_limit_s, "seconds"_a)
      .def("all_gather", &all_gather, "own"_a, "out"_a.noconvert(), "sizes"_a);
  m.def("thread_windows", &thread_windows, "size"_a, "room_bytes"_a);
  m.def("window_bytes", &Window::bytes_for, "size"_a, "room_bytes"_a);
  m.def("mapped_window", [](int descriptor, int rank, int size, size_t room_bytes) {
    return window_over(mapped_window(descriptor, size, room_bytes), rank, size, room_bytes);
  }, "descriptor"_a, "rank"_a, "size"_a, "room_bytes"_a);
}

}  // namespace tokenmill
