// Packing by panels, for callers with several threads: panels are independent, and each is zeroed and filled by one core while
// it is in that core's cache.
#pragma once
#include "matrix.h"

namespace tokenmill {

// Allocates a matrix without filling it.
Matrix empty_matrix(const Packing& packing, int rows, int cols);
// Fills panels [first, last) from the file's rows.
void pack_panels(const Matrix& m, int first, int last, const uint8_t* source, size_t row_bytes);

}  // namespace tokenmill
