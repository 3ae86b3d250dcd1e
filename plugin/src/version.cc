// SPDX-License-Identifier: Apache-2.0
//
// The version that the library was built as.
#include "bitopk/version.h"

namespace bitopk {

const char* Version() { return BITOPK_VERSION; }

}  // namespace bitopk
