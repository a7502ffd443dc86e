// Types shared by the bindings. Memory is passed as arrays of any library (DLPack); every size is checked here or in
// Decoder::check before a pointer is used. Long calls release the GIL. Output arrays are never converted (`noconvert`):
// results written to a converted copy would be lost.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <string>

#include "decoder.h"

namespace tokenmill {

namespace nb = nanobind;
using namespace nb::literals;

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;
// Blocks along the first axis, each contiguous; they may be further apart than they are large.
using BlockArray = nb::ndarray<nb::device::cpu>;
using BlockScales = nb::ndarray<float, nb::ndim<3>, nb::device::cpu>;
using FloatVector = Array<const float, 1>;

inline constexpr float kNever = std::numeric_limits<float>::infinity();

const Kernels& kernels_or_best(const std::string& name);  // empty name: the best that the processor runs
Vector vector_of(const std::optional<FloatVector>& array, size_t size, const char* what);
Linear linear_of(const Matrix& w, const std::optional<FloatVector>& bias);

void bind_matrices(nb::module_& m);
void bind_single_kernels(nb::module_& m);
void bind_windows(nb::module_& m);

}  // namespace tokenmill
