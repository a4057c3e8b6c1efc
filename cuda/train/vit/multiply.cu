/* Matrix products by cuBLASLt. vit_multiplier_probe() loads cuBLASLt at run time, so that the other variants
 * run without it. cuBLASLt's matrices are column-major, and the engine's are row-major. cuBLASLt therefore
 * sees each matrix of the engine as its transpose. cuBLASLt's heuristic chooses the algorithm of each
 * product. Algorithms are not chosen by measurement, so that repeated runs give the same bits. */
#include <cublasLt.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <type_traits>

#include "common/check.cuh"
#include "train/vit/kernels.cuh"

#define TEXT_(x)        #x
#define TEXT(x)         TEXT_(x)
#define CUBLAS_LIBRARY  "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)
#define WORKSPACE_BYTES ((size_t)64 << 20)
#define ALIGNMENT       64 /* of each matrix, in bytes */
#define PLANS_MAX       64

/* ---- The library ---- */

#define FUNCTIONS(X)                \
    X(Create)                       \
    X(Destroy)                      \
    X(MatmulDescCreate)             \
    X(MatmulDescSetAttribute)       \
    X(MatmulDescDestroy)            \
    X(MatrixLayoutCreate)           \
    X(MatrixLayoutDestroy)          \
    X(MatmulPreferenceCreate)       \
    X(MatmulPreferenceSetAttribute) \
    X(MatmulPreferenceDestroy)      \
    X(MatmulAlgoGetHeuristic)       \
    X(Matmul)

static struct {
    bool there;
#define MEMBER(name) decltype(&cublasLt##name) name;
    FUNCTIONS(MEMBER)
#undef MEMBER
} blas;

enum status vit_multiplier_probe(void)
{
    if (blas.there)
        return STATUS_OK;
    void *library = dlopen(CUBLAS_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return status_set(STATUS_UNAVAILABLE,
                          "needs cuBLAS " TEXT(CUBLAS_VER_MAJOR) ": %s; install it, or add its folder to "
                                                                 "LD_LIBRARY_PATH",
                          dlerror());
#define FIND(name)                                           \
    *(void **)&blas.name = dlsym(library, "cublasLt" #name); \
    if (!blas.name)                                          \
        return status_set(STATUS_UNAVAILABLE,                \
                          "needs a newer cuBLAS: " CUBLAS_LIBRARY " has no cublasLt" #name);
    FUNCTIONS(FIND)
#undef FIND
    blas.there = true;
    return STATUS_OK;
}

static enum status blas_status(cublasStatus_t result, const char *call, int line)
{
    static_assert(CUBLAS_STATUS_ALLOC_FAILED == (int)CUBLAS_CODE_MEMORY, "exhausted.h has another code");
    enum status status = library_status(LIBRARY_CUBLAS, result);
    return status == STATUS_OK ? STATUS_OK
                               : status_set(status, "cublasLt%s failed with status %d (%s:%d)", call,
                                            (int)result, __FILE__, line);
}

/* Calls a function of cuBLASLt, named without its prefix `cublasLt`. If the call fails, returns the failure
 * from the calling function: STATUS_EXHAUSTED if memory ran out, else STATUS_FAILED. */
#define BLAS_TRY(call) TRY(blas_status(blas.call, #call, __LINE__))

/* ---- Plans ---- */

enum product { PRODUCT_FORWARD, PRODUCT_INPUTS, PRODUCT_WEIGHTS };

/* The matrix product that a plan computes. */
struct plan_key {
    enum product product;
    bool wide;         /* the result is in fp32 */
    cudaDataType type; /* of the other matrices */
    struct vit_linear linear;
};

template <class T>
static constexpr cudaDataType type_of = std::is_same<T, bf16>::value   ? CUDA_R_16BF
                                        : std::is_same<T, fp16>::value ? CUDA_R_16F
                                                                       : CUDA_R_32F;

/* A zeroed plan is empty. */
struct product_plan {
    bool used;
    struct plan_key key;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t left, right, result;
    cublasLtMatmulAlgo_t algorithm;
};

struct vit_multiplier {
    cublasLtHandle_t handle;
    void *workspaces[2]; /* for gradients of weights, which may be computed while other products are: the
                            second one */
    struct product_plan plans[PLANS_MAX];
    uint32_t next; /* index of the plan to replace next */
};

static void plan_free(struct product_plan *plan)
{
    if (plan->product)
        (void)blas.MatmulDescDestroy(plan->product);
    for (cublasLtMatrixLayout_t layout : {plan->left, plan->right, plan->result})
        if (layout)
            (void)blas.MatrixLayoutDestroy(layout);
    *plan = {};
}

static bool same_key(const struct plan_key *a, const struct plan_key *b)
{
    return a->product == b->product && a->wide == b->wide && a->type == b->type &&
           a->linear.rows == b->linear.rows && a->linear.in == b->linear.in &&
           a->linear.out == b->linear.out && a->linear.apart == b->linear.apart;
}

/* Sizes in cuBLASLt's terms: result (m, n) = left (m, k) * right (k, n), and the distance between columns of
 * each matrix. */
struct sizes {
    uint64_t m, n, k;
    cublasOperation_t left, right;
    int64_t left_apart, right_apart, result_apart;
};

static struct sizes sizes_of(const struct plan_key *key)
{
    const struct vit_linear *of = &key->linear;
    switch (key->product) {
    case PRODUCT_FORWARD:
        return {of->out, of->rows, of->in, CUBLAS_OP_T, CUBLAS_OP_N, of->in, of->in, of->apart};
    case PRODUCT_INPUTS:
        return {of->in, of->rows, of->out, CUBLAS_OP_N, CUBLAS_OP_N, of->in, of->apart, of->in};
    default:
        return {of->in, of->out, of->rows, CUBLAS_OP_N, CUBLAS_OP_T, of->in, of->apart, of->in};
    }
}

static enum status describe(struct product_plan *plan, const struct sizes *sizes)
{
    const bool left = sizes->left == CUBLAS_OP_T, right = sizes->right == CUBLAS_OP_T;
    const cublasLtEpilogue_t epilogue =
        plan->key.product == PRODUCT_FORWARD ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    BLAS_TRY(MatmulDescCreate(&plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    BLAS_TRY(
        MatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_TRANSA, &sizes->left, sizeof sizes->left));
    BLAS_TRY(MatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_TRANSB, &sizes->right,
                                    sizeof sizes->right));
    BLAS_TRY(
        MatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    BLAS_TRY(MatrixLayoutCreate(&plan->left, plan->key.type, left ? sizes->k : sizes->m,
                                left ? sizes->m : sizes->k, sizes->left_apart));
    BLAS_TRY(MatrixLayoutCreate(&plan->right, plan->key.type, right ? sizes->n : sizes->k,
                                right ? sizes->k : sizes->n, sizes->right_apart));
    BLAS_TRY(MatrixLayoutCreate(&plan->result, plan->key.wide ? CUDA_R_32F : plan->key.type, sizes->m,
                                sizes->n, sizes->result_apart));
    return STATUS_OK;
}

static enum status set_preference(cublasLtMatmulPreference_t preference)
{
    const size_t workspace = WORKSPACE_BYTES;
    const uint32_t alignment = ALIGNMENT;
    BLAS_TRY(MatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                          sizeof workspace));
    for (cublasLtMatmulPreferenceAttributes_t each :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        BLAS_TRY(MatmulPreferenceSetAttribute(preference, each, &alignment, sizeof alignment));
    return STATUS_OK;
}

static enum status choose(const struct vit_multiplier *self, struct product_plan *plan)
{
    const struct vit_linear *of = &plan->key.linear;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t best;
    cublasStatus_t result = CUBLAS_STATUS_SUCCESS;
    int found = 0;
    BLAS_TRY(MatmulPreferenceCreate(&preference));
    enum status status = set_preference(preference);
    if (status == STATUS_OK)
        result = blas.MatmulAlgoGetHeuristic(self->handle, plan->product, plan->left, plan->right,
                                             plan->result, plan->result, preference, 1, &best, &found);
    (void)blas.MatmulPreferenceDestroy(preference);
    TRY(status);
    TRY(blas_status(result == CUBLAS_STATUS_ALLOC_FAILED ? result : CUBLAS_STATUS_SUCCESS,
                    "MatmulAlgoGetHeuristic", __LINE__));
    if (result != CUBLAS_STATUS_SUCCESS || found == 0)
        return status_set(
            STATUS_FAILED,
            "cuBLASLt has no algorithm for a linear layer of %u inputs and %u outputs on %u rows "
            "(status %d)",
            of->in, of->out, of->rows, (int)result);
    plan->algorithm = best.algo;
    return STATUS_OK;
}

/* Finds the plan of a matrix product, or creates it. */
static enum status plan_for(struct vit_multiplier *self, const struct plan_key *key,
                            struct product_plan **into)
{
    for (struct product_plan &plan : self->plans)
        if (plan.used && same_key(&plan.key, key)) {
            *into = &plan;
            return STATUS_OK;
        }
    struct product_plan *plan = &self->plans[self->next];
    self->next = (self->next + 1) % PLANS_MAX;
    plan_free(plan);
    plan->key = *key;
    const struct sizes sizes = sizes_of(key);
    TRY(describe(plan, &sizes));
    TRY(choose(self, plan));
    plan->used = true;
    *into = plan;
    return STATUS_OK;
}

static enum status multiply(struct vit_multiplier *self, struct product_plan *plan, const void *left,
                            const void *right, void *result, cudaStream_t stream)
{
    const float one = 1, zero = 0;
    BLAS_TRY(Matmul(self->handle, plan->product, &one, left, plan->left, right, plan->right, &zero, result,
                    plan->result, result, plan->result, &plan->algorithm,
                    self->workspaces[plan->key.product == PRODUCT_WEIGHTS], WORKSPACE_BYTES, stream));
    return STATUS_OK;
}

/* ---- The interface ---- */

enum status vit_multiplier_open(struct allocations *allocations, bool backward,
                                struct vit_multiplier **multiplier)
{
    TRY(vit_multiplier_probe());
    struct vit_multiplier *self = static_cast<struct vit_multiplier *>(calloc(1, sizeof *self));
    *multiplier = self;
    TRY(ALLOCATED(self, "vit: out of memory"));
    for (int i = 0; i <= backward; i++)
        TRY(allocate_bytes(allocations, &self->workspaces[i], WORKSPACE_BYTES));
    BLAS_TRY(Create(&self->handle));
    return STATUS_OK;
}

void vit_multiplier_close(struct vit_multiplier *multiplier)
{
    if (!multiplier)
        return;
    for (struct product_plan &plan : multiplier->plans)
        plan_free(&plan);
    if (multiplier->handle)
        (void)blas.Destroy(multiplier->handle);
    free(multiplier);
}

template <class T>
enum status vit_linear_forward(struct vit_multiplier *multiplier, const struct vit_linear *linear, bool wide,
                               const T *inputs, const T *weights, const void *bias, void *outputs,
                               cudaStream_t stream)
{
    const struct plan_key key = {PRODUCT_FORWARD, wide, type_of<T>, *linear};
    struct product_plan *plan;
#if HAVE_HOPPER
    if constexpr (std::is_same<T, bf16>::value || std::is_same<T, fp16>::value) {
        bool fits;
        TRY(linear_hopper_fits(linear, false, &fits));
        if (fits && !wide)
            return linear_hopper<T>(linear, false, 0, inputs, weights, static_cast<const T *>(bias),
                                    static_cast<T *>(outputs), stream);
    }
#endif
    TRY(plan_for(multiplier, &key, &plan));
    BLAS_TRY(MatmulDescSetAttribute(plan->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    return multiply(multiplier, plan, weights, inputs, outputs, stream);
}

template <class T>
enum status vit_linear_inputs(struct vit_multiplier *multiplier, const struct vit_linear *linear,
                              uint32_t spared, const T *out_deltas, const T *weights, T *in_deltas,
                              cudaStream_t stream)
{
    const struct plan_key key = {PRODUCT_INPUTS, false, type_of<T>, *linear};
    struct product_plan *plan;
#if HAVE_HOPPER
    if constexpr (std::is_same<T, bf16>::value || std::is_same<T, fp16>::value) {
        bool fits;
        TRY(linear_hopper_fits(linear, true, &fits));
        if (fits)
            return linear_hopper<T>(linear, true, spared, out_deltas, weights, nullptr, in_deltas, stream);
    }
#else
    (void)spared;
#endif
    TRY(plan_for(multiplier, &key, &plan));
    return multiply(multiplier, plan, weights, out_deltas, in_deltas, stream);
}

template <class T>
enum status vit_linear_weights(struct vit_multiplier *multiplier, const struct vit_linear *linear,
                               const T *out_deltas, const T *inputs, float *gradients, cudaStream_t stream)
{
    const struct plan_key key = {PRODUCT_WEIGHTS, true, type_of<T>, *linear};
    struct product_plan *plan;
    TRY(plan_for(multiplier, &key, &plan));
    return multiply(multiplier, plan, inputs, out_deltas, gradients, stream);
}

template <class T>
enum status vit_weights_backward(struct vit_multiplier *multiplier, const struct vit_weights<T> *layers,
                                 uint32_t count, struct vit_sums *sums, cudaStream_t stream)
{
#if HAVE_HOPPER
    bool fit;
    TRY(weights_hopper_fit<T>(layers, count, sums, &fit));
    if (fit)
        return weights_hopper<T>(layers, count, sums, stream);
#else
    (void)sums;
#endif
    for (uint32_t i = 0; i < count; i++)
        TRY(vit_linear_weights<T>(multiplier, &layers[i].linear, layers[i].deltas, layers[i].inputs,
                                  layers[i].gradients, stream));
    return STATUS_OK;
}

EACH_HALF(vit_weights_backward)
EACH_HALF(vit_linear_forward)
template decltype(vit_linear_forward<float>) vit_linear_forward<float>;
EACH_HALF(vit_linear_inputs)
template decltype(vit_linear_inputs<float>) vit_linear_inputs<float>;
EACH_HALF(vit_linear_weights)
template decltype(vit_linear_weights<float>) vit_linear_weights<float>;
