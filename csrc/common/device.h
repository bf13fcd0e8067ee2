#pragma once

#include <c10/core/Device.h>

namespace mmdet3d_ext {

// Throws if this library holds no code that the GPU can run (checked once a device): such a launch would otherwise leave its output
// unwritten in builds that do not check launches.
void require_covered(c10::Device device);

}  // namespace mmdet3d_ext
