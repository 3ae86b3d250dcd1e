# SPDX-License-Identifier: Apache-2.0
#
# Finds what the libraries link: targets `gloo` and `hwy::hwy`, by CMake packages first and pkg-config or a plain search
# second. Used by this build and, installed beside bitopkConfig.cmake, by programs that use the installed package.

find_package(Threads REQUIRED)

if(NOT TARGET hwy::hwy)
  find_package(hwy CONFIG QUIET NAMES hwy HWY)
endif()
if(NOT TARGET hwy::hwy)
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(bitopk_hwy QUIET IMPORTED_TARGET libhwy)
  endif()
  if(NOT TARGET PkgConfig::bitopk_hwy)
    message(FATAL_ERROR "bitopk needs Highway (Debian and Ubuntu: libhwy-dev)")
  endif()
  add_library(hwy::hwy INTERFACE IMPORTED)
  target_link_libraries(hwy::hwy INTERFACE PkgConfig::bitopk_hwy)
endif()

if(NOT TARGET gloo)
  find_package(Gloo CONFIG QUIET)
endif()
if(NOT TARGET gloo)
  find_path(BITOPK_GLOO_INCLUDE_DIR gloo/context.h)
  find_library(BITOPK_GLOO_LIBRARY gloo)
  mark_as_advanced(BITOPK_GLOO_INCLUDE_DIR BITOPK_GLOO_LIBRARY)
  if(NOT BITOPK_GLOO_INCLUDE_DIR OR NOT BITOPK_GLOO_LIBRARY)
    message(FATAL_ERROR "bitopk needs Gloo (Debian and Ubuntu: libgloo-dev)")
  endif()
  add_library(gloo UNKNOWN IMPORTED)
  set_target_properties(gloo PROPERTIES
    IMPORTED_LOCATION ${BITOPK_GLOO_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${BITOPK_GLOO_INCLUDE_DIR})
endif()
