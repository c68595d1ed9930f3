#include "quantiles.h"

namespace shoal {
namespace {
#include "quantiles.inc"
}  // namespace
const float* const kNormalQuantiles = NORMAL_QUANTILES;
const float* const kTruncatedQuantiles = TRUNCATED_QUANTILES;
}  // namespace shoal
