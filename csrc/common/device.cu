#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "common/device.h"
#include "mmdet3d_ext_build.h"

namespace mmdet3d_ext {
namespace {

__global__ void probe_kernel() {}

std::array<std::atomic<bool>, 64> covered;

}  // namespace

void require_covered(c10::Device device) {
  const int index = device.index();
  if (index < 64 && covered[index].load(std::memory_order_relaxed)) return;
  const c10::cuda::CUDAGuard guard(device);
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    const cudaDeviceProp* properties = at::cuda::getDeviceProperties(index);
    TORCH_CHECK(false, "mmdet3d_ext: this build (", MMDET3D_EXT_BUILD, ") holds no code for ", device, " (", properties->name,
                ", compute capability ", properties->major, ".", properties->minor, "): ", cudaGetErrorString(status),
                ". Rebuild with TORCH_CUDA_ARCH_LIST=", properties->major, ".", properties->minor,
                " pip install --no-build-isolation --no-deps -e .");
  }
  if (index < 64) covered[index].store(true, std::memory_order_relaxed);
}

}  // namespace mmdet3d_ext
