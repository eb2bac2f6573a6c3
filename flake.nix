{
  description = "portable-kernels: Triton kernels for the Hugging Face Kernels Hub";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;

      # For the shells and CI that run tests/; nothing here reaches the published package.
      pythonCheckInputs =
        pkgs: with pkgs; [
          hypothesis
          numpy
          transformers
        ];
    };
}
