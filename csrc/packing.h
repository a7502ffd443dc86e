// Packing cut into panels, for callers with several threads: panels are independent, and each is zeroed and filled while it lies
// in the cache of the core that does it.
#pragma once
#include "matrix.h"

namespace tokenmill {

// A matrix with its memory but no values yet.
Matrix empty_matrix(const Packing& packing, int rows, int cols);
// Fills panels [first, last) from the file's rows.
void pack_panels(const Matrix& m, int first, int last, const uint8_t* source, size_t row_bytes);

}  // namespace tokenmill
