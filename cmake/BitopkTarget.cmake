# SPDX-License-Identifier: Apache-2.0
#
# bitopk_configure_target(TARGET): the language level, warnings and flags that every target of this project shares.

function(bitopk_configure_target target)
  target_compile_features(${target} PUBLIC cxx_std_17)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    POSITION_INDEPENDENT_CODE ON)
  if(NOT BUILD_SHARED_LIBS)
    # Whoever links the static libraries into a module of their own exports none of our symbols from it.
    set_target_properties(${target} PROPERTIES
      CXX_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON)
  endif()
  # Private code is included from the root of the tree: "plugin/src/x.h", "kernels/cpu/x.h", "tests/support/x.h".
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(${target} PRIVATE
    # Results are the same bytes with every instruction set, so a * b + c is never fused behind our back.
    -ffp-contract=off
    -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-qual -Wundef -Wimplicit-fallthrough)
  if(BITOPK_SANITIZE)
    target_compile_options(${target} PRIVATE
      -fsanitize=${BITOPK_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${BITOPK_SANITIZE})
  endif()
endfunction()
