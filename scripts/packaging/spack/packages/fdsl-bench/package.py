# Spack recipe. From a checkout of fdsl-bench:
#
#   spack repo add scripts/packaging/spack
#   spack dev-build fdsl-bench@main +cuda cuda_arch=90
from spack.package import *


class FdslBench(MakefilePackage, CudaPackage):
    """Benchmarks generating, loading and training on formula-driven images; libfdsl generates such images in any program."""

    version("main")

    license("MIT")

    variant("mpi", default=True, description="run several ranks")
    variant("openmp", default=True, description="build the variants that use OpenMP")

    depends_on("c", type="build")
    depends_on("cxx", type="build", when="+cuda")
    depends_on("gmake", type="build")
    depends_on("mpi", when="+mpi")
    depends_on("cuda@12.1:", when="+cuda")
    depends_on("hwloc")
    depends_on("libpng")
    depends_on("jansson")
    depends_on("xxhash")
    depends_on("zlib-api")
    depends_on("zstd")
    depends_on("openssl")
    depends_on("liburing")
    depends_on("inih")
    depends_on("python@3.9:", type=("build", "run"))

    requires("%gcc@12:", "%clang@14:", policy="one_of")
    conflicts("cuda_arch=none", when="+cuda", msg="give cuda_arch, for example cuda_arch=90")

    @property
    def settings(self):
        """Arguments of make, for building and installing."""
        spec = self.spec
        settings = [
            f"CC={spack_cc}",
            f"PREFIX={self.prefix}",
            f"CUDA={int('+cuda' in spec)}",
            f"MPI={int('+mpi' in spec)}",
            f"OMP={int('+openmp' in spec)}",
            "SETUP=0",
        ]
        if "+cuda" in spec:
            settings += [f"CUDA_HOME={spec['cuda'].prefix}", f"CUDA_ARCHS={' '.join(spec.variants['cuda_arch'].value)}"]
        if "+mpi" in spec:
            settings.append(f"MPICC={spec['mpi'].mpicc}")
        return settings

    def build(self, spec, prefix):
        make(*self.settings, "all", "lib")

    def install(self, spec, prefix):
        make(*self.settings, "install")

    @run_after("install")
    @on_package_attributes(run_tests=True)
    def check_images(self):
        program = Executable(self.prefix.bin.join("fdsl-bench"))
        program("--variant", "naive", "--verify", "--batch", "2", "--res", "64")
