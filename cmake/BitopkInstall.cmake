# SPDX-License-Identifier: Apache-2.0
#
# Installs the libraries, their headers, the CMake package bitopk and bitopk.pc. tests/install/ consumes both.

include(CMakePackageConfigHelpers)

set(bitopk_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/bitopk)
set_target_properties(bitopk_kernels PROPERTIES EXPORT_NAME kernels)
if(BUILD_SHARED_LIBS)
  # The engine finds the kernels beside it, wherever the two are put.
  set_target_properties(bitopk PROPERTIES INSTALL_RPATH "\$ORIGIN")
endif()

install(TARGETS bitopk_kernels bitopk EXPORT bitopkTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT development)
install(DIRECTORY
  ${PROJECT_SOURCE_DIR}/kernels/include/
  ${PROJECT_SOURCE_DIR}/plugin/include/
  ${PROJECT_BINARY_DIR}/generated/include/
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
  FILES_MATCHING PATTERN "*.h")

install(EXPORT bitopkTargets NAMESPACE bitopk:: DESTINATION ${bitopk_cmake_dir} COMPONENT development)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/bitopkConfig.cmake.in
  ${PROJECT_BINARY_DIR}/generated/bitopkConfig.cmake INSTALL_DESTINATION ${bitopk_cmake_dir})
# Below 1.0 a minor version may break the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/generated/bitopkConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/generated/bitopkConfig.cmake
  ${PROJECT_BINARY_DIR}/generated/bitopkConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/BitopkDependencies.cmake
  DESTINATION ${bitopk_cmake_dir} COMPONENT development)

# Static libraries do not know what they need, so then the .pc file says it to everyone, not only to --static.
set(bitopk_pc_private "")
if(BUILD_SHARED_LIBS)
  set(bitopk_pc_private ".private")
endif()
foreach(dir LIBDIR INCLUDEDIR)
  string(TOLOWER ${dir} name)
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${dir}}")
    set(bitopk_pc_${name} ${CMAKE_INSTALL_${dir}})
  else()
    set(bitopk_pc_${name} "\${prefix}/${CMAKE_INSTALL_${dir}}")
  endif()
endforeach()
# The prefix may be chosen as late as `cmake --install --prefix`, so the file finds its own from where it lies.
file(RELATIVE_PATH bitopk_pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" bitopk_pc_prefix "${bitopk_pc_prefix}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/bitopk.pc.in ${PROJECT_BINARY_DIR}/generated/bitopk.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/generated/bitopk.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
