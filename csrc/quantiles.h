#pragma once
// Fixed normal quantiles, so that normal initial values use only operations IEEE 754 fixes.

namespace shoal {
extern const float* const kNormalQuantiles;     // 4097 values
extern const float* const kTruncatedQuantiles;  // 4097 values, two standard deviations
}  // namespace shoal
