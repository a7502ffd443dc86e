// The kernels compiled for one instruction set; CMakeLists.txt gives this file its own compiler flags.
#define TM_ISA avx2
#include "half.h"
#include "kernels.h"
#include "simd/avx2.h"
//
#include "kernels/linear.h"
//
#include "kernels/elementwise.h"
//
#include "kernels/rounding.h"
//
#include "kernels/attention.h"
//
#include "kernels/attention_int8.h"
//
#include "kernels/recurrent.h"
//
#include "kernels/selective_scan.h"
//
#include "kernels/latent_attention.h"
//
#include "kernels/draws.h"
//
#include "kernels/table.h"

namespace tokenmill {
const Kernels& avx2_kernels() {
  static const Kernels table = avx2::make_table("avx2");
  return table;
}
}  // namespace tokenmill
