// SPDX-License-Identifier: Apache-2.0
//
// The version that the headers and the library announce.
#include "bitopk/version.h"

#include <gtest/gtest.h>

#include <string>

namespace bitopk {
namespace {

TEST(Version, IsTheSameInHeadersAndLibrary) {
  EXPECT_STREQ(Version(), BITOPK_VERSION);
  EXPECT_EQ(std::to_string(BITOPK_VERSION_MAJOR) + "." + std::to_string(BITOPK_VERSION_MINOR) +
                "." + std::to_string(BITOPK_VERSION_PATCH),
            Version());
}

}  // namespace
}  // namespace bitopk
