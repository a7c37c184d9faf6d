"""Kernels by the names that people use; the long ones are of public traces."""

from __future__ import annotations

import pytest

from chakra_et.diagnose.kernel_names import LONGEST, kernel_name

NAMES = {
    "ampere_sgemm_128x64_tn": "ampere_sgemm_128x64_tn",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>)": "elementwise add",
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}>("
    "at::TensorIteratorBase&)::{lambda(int)#1}>(int, int)": "elementwise direct copy",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
    "at::native::binary_internal::MulFunctor<float> >, at": "elementwise mul",  # cut off
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>, "
    "unsigned int, float, 4> >(at::native::ReduceOp<float>)": "reduce mean",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<2>, std::plus<float>, float>(float)": "multi tensor apply plus",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>("
    "Params)": "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8",
    "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float>(x)": "gemvx::kernel",
    "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
    "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*)": "fused_add_rms_norm_kernel",
    "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_":
    "elementwise add",
    "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassINS_1E": "Rmsnorm2dFwd",
    "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblockE":
    "ImplicitGemmConvolution",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)":
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN_LDSB0":
    "Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32",
    "Memcpy DtoH (Device -> Pageable)": "Memcpy DtoH (Device -> Pageable)",
    "triton_poi_fused_add_mul_0": "triton_poi_fused_add_mul_0",
    "": "",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_are_what_people_say(name: str) -> None:
    assert kernel_name(name) == NAMES[name]


@pytest.mark.parametrize(
    "name", ["_Z", "_ZN", "(", "a<b", "<>", "))>>", "x" * 500, "_ZN99short", "void f", "\n<"]
)
def test_no_name_is_too_strange(name: str) -> None:
    assert len(kernel_name(name)) <= LONGEST and "\n" not in kernel_name(name)
