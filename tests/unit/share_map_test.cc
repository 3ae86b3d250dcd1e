// SPDX-License-Identifier: Apache-2.0
#include "plugin/src/share_map.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bitopk/kernels/error.h"

namespace bitopk {
namespace {

constexpr std::size_t kSizes[] = {0, 1, 1023, 1024, 1025, 5000, 70001};

struct Layout {
  ShareMap map;
  std::string name;
};

std::vector<Layout> LayoutsOf(std::size_t num_entries, std::size_t num_owners) {
  std::vector<Layout> layouts;
  layouts.push_back({ShareMap::Replicated(num_entries), "replicated"});
  for (std::size_t owner = 0; owner < num_owners; ++owner) {
    layouts.push_back({ShareMap::Whole(num_entries, num_owners, owner),
                       internal::StrCat("whole, owner ", owner)});
    layouts.push_back({ShareMap::Dealt(num_entries, num_owners, owner),
                       internal::StrCat("dealt from owner ", owner)});
  }
  return layouts;
}

template <typename F>
void ForEachLayout(F f) {
  for (const std::size_t num_entries : kSizes) {
    for (std::size_t num_owners = 1; num_owners <= 9; ++num_owners) {
      for (const Layout& layout : LayoutsOf(num_entries, num_owners)) {
        SCOPED_TRACE(
            internal::StrCat(num_entries, " entries, ", num_owners, " owners, ", layout.name));
        f(layout.map);
      }
    }
  }
}

// Owner and position of every entry, by EntryAt.
struct Place {
  std::size_t owner = ~std::size_t{0};
  std::size_t position = 0;
};

std::vector<Place> PlacesOf(const ShareMap& map) {
  std::vector<Place> places(map.num_entries());
  for (std::size_t owner = 0; owner < map.num_owners(); ++owner) {
    for (std::size_t position = 0; position < map.NumPositions(owner); ++position) {
      const std::size_t entry = map.EntryAt(owner, position);
      if (entry < places.size()) places[entry] = {owner, position};
    }
  }
  return places;
}

TEST(ShareMap, PositionsAndEntriesAreABijection) {
  ForEachLayout([](const ShareMap& map) {
    std::vector<int> seen(map.num_entries(), 0);
    for (std::size_t owner = 0; owner < map.num_owners(); ++owner) {
      for (std::size_t position = 0; position < map.NumPositions(owner); ++position) {
        const std::size_t entry = map.EntryAt(owner, position);
        ASSERT_LT(entry, map.num_entries());
        ++seen[entry];
      }
    }
    EXPECT_EQ(seen, std::vector<int>(map.num_entries(), 1));
  });
}

TEST(ShareMap, EntriesAscendWithPositions) {
  ForEachLayout([](const ShareMap& map) {
    for (std::size_t owner = 0; owner < map.num_owners(); ++owner) {
      for (std::size_t position = 1; position < map.NumPositions(owner); ++position) {
        ASSERT_LT(map.EntryAt(owner, position - 1), map.EntryAt(owner, position));
      }
    }
  });
}

TEST(ShareMap, PiecesCoverAShareInOrder) {
  ForEachLayout([](const ShareMap& map) {
    for (std::size_t owner = 0; owner < map.num_owners(); ++owner) {
      std::size_t next = 0;
      map.ForEachPiece(owner, [&](std::size_t entry, std::size_t position, std::size_t count) {
        ASSERT_EQ(position, next);
        ASSERT_GT(count, 0U);
        ASSERT_EQ(entry, map.EntryAt(owner, position));
        ASSERT_EQ(entry + count - 1, map.EntryAt(owner, position + count - 1));
        next += count;
      });
      EXPECT_EQ(next, map.NumPositions(owner));
    }
  });
}

TEST(ShareMap, SplitAgreesWithEntryAt) {
  std::mt19937 random(7);
  std::vector<std::uint32_t> positions;
  std::vector<float> values;
  std::vector<std::size_t> starts;
  ForEachLayout([&](const ShareMap& map) {
    const std::vector<Place> places = PlacesOf(map);
    for (const unsigned every : {1U, 3U, 1000U}) {
      std::vector<std::uint32_t> entries;
      std::vector<float> given;
      std::vector<std::vector<std::uint32_t>> expected(map.num_owners());
      std::vector<std::vector<float>> expected_values(map.num_owners());
      for (std::uint32_t entry = 0; entry < map.num_entries(); ++entry) {
        if (random() % every != 0) continue;
        entries.push_back(entry);
        given.push_back(static_cast<float>(entry));
        expected[places[entry].owner].push_back(static_cast<std::uint32_t>(places[entry].position));
        expected_values[places[entry].owner].push_back(given.back());
      }
      map.Split(entries, given, positions, values, starts);
      ASSERT_EQ(starts.size(), map.num_owners() + 1);
      EXPECT_EQ(starts.front(), 0U);
      EXPECT_EQ(starts.back(), entries.size());
      for (std::size_t owner = 0; owner < map.num_owners(); ++owner) {
        const auto from = static_cast<std::ptrdiff_t>(starts[owner]);
        const auto to = static_cast<std::ptrdiff_t>(starts[owner + 1]);
        ASSERT_EQ(std::vector<std::uint32_t>(positions.begin() + from, positions.begin() + to),
                  expected[owner]);
        ASSERT_EQ(std::vector<float>(values.begin() + from, values.begin() + to),
                  expected_values[owner]);
      }
    }
  });
}

TEST(ShareMap, DealsSharesThatDifferByAtMostOneBlock) {
  for (std::size_t num_owners = 1; num_owners <= 9; ++num_owners) {
    for (std::size_t first = 0; first < num_owners; ++first) {
      const ShareMap map = ShareMap::Dealt(70001, num_owners, first);
      std::size_t smallest = 70001;
      std::size_t largest = 0;
      for (std::size_t owner = 0; owner < num_owners; ++owner) {
        smallest = std::min(smallest, map.NumPositions(owner));
        largest = std::max(largest, map.NumPositions(owner));
      }
      EXPECT_LE(largest - smallest, kDealtBlock);
    }
  }
}

// 2^32 entries, the largest unit: no arithmetic of the map may be of 32 bits.
TEST(ShareMap, HoldsTheLargestUnit) {
  const std::size_t num_entries = std::size_t{1} << 32;
  const ShareMap map = ShareMap::Dealt(num_entries, 3, 1);
  EXPECT_EQ(map.NumPositions(0) + map.NumPositions(1) + map.NumPositions(2), num_entries);
  const std::size_t last_block = num_entries / kDealtBlock - 1;
  const std::size_t owner = (last_block + 1) % 3;
  EXPECT_EQ(map.EntryAt(owner, map.NumPositions(owner) - 1), num_entries - 1);
}

}  // namespace
}  // namespace bitopk
