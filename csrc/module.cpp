// The Python module; the bindings of each subject are in bindings/.
#include <stdexcept>

#include "bindings/held_decoder.h"

#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace tokenmill {

const Kernels& kernels_or_best(const std::string& name) {
  if (name.empty()) return best_kernels();
  const Kernels* found = kernels_named(name);
  if (found == nullptr) throw std::invalid_argument("this processor can't run the kernels for " + name);
  return *found;
}

namespace {

// Loads a shared library without holding the GIL, so that a later import of a module that needs it finds it loaded.
bool load_library(const std::string& path) {
#if defined(__linux__)
  nb::gil_scoped_release free;
  return dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL) != nullptr;
#else
  return path.empty();
#endif
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native CPU kernels; see tokenmill/ops/cpu.";
  m.def("instruction_set", [] { return std::string(best_kernels().name); });
  m.def("instruction_sets", &runnable_kernels);
  m.def("load_library", &load_library, "path"_a);
  bind_matrices(m);
  bind_single_kernels(m);
  bind_windows(m);
  nb::class_<HeldDecoder> decoder = bind_decoders(m);
  bind_steps(decoder);
  bind_draws(m, decoder);
}

}  // namespace tokenmill
