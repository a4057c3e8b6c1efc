/* Opens libcurl, Expat and libcrypto when a data set at a URL needs them. The library can therefore be
 * loaded, and used for everything else, on machines without them. The functions below have the names of the
 * functions of these libraries, and jump to them. They are visible only within libfdsl. */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "core/portable.h"
#include "data/remote.h"
#include "lib/late.h"

#define CURL_FUNCTIONS(do)                                                                                                   \
    do                                                                                                                       \
    (0, curl_easy_cleanup) do(1, curl_easy_init) do(2, curl_easy_perform) do(3, curl_easy_reset) do(4, curl_easy_setopt) do( \
        5,                                                                                                                   \
        curl_easy_strerror) do(6,                                                                                            \
                               curl_getdate) do(7,                                                                           \
                                                curl_global_init) do(8,                                                      \
                                                                     curl_slist_append) do(9,                                \
                                                                                           curl_slist_free_all)
#define EXPAT_FUNCTIONS(do)                                                                                                                     \
    do                                                                                                                                          \
    (10, XML_ErrorString) do(11, XML_GetCurrentByteIndex) do(12, XML_GetErrorCode) do(13, XML_Parse) do(14, XML_ParserCreateNS) do(             \
        15,                                                                                                                                     \
        XML_ParserFree) do(16,                                                                                                                  \
                           XML_SetCharacterDataHandler) do(17,                                                                                  \
                                                           XML_SetElementHandler) do(18,                                                        \
                                                                                     XML_SetStartDoctypeDeclHandler) do(19,                     \
                                                                                                                        XML_SetUserData) do(20, \
                                                                                                                                            XML_StopParser)
#define CRYPTO_FUNCTIONS(do)                                                                           \
    do                                                                                                 \
    (21, EVP_Digest) do(22, EVP_DigestFinal_ex) do(23, EVP_DigestInit_ex) do(24, EVP_DigestUpdate) do( \
        25, EVP_MD_CTX_free) do(26, EVP_MD_CTX_new) do(27, EVP_md5) do(28, EVP_sha256) do(29, HMAC)
#define FUNCTIONS 30

/* What a function does before its library is open: it returns NULL, which callers treat as a failure. */
static void *absent(void)
{
    return NULL;
}

/* The addresses of the functions, by their numbers. The assembler code below uses it by this name. */
void *late_functions[FUNCTIONS];

#if defined(__x86_64__)
#define JUMP(number) "endbr64\n jmp *late_functions+8*" #number "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(number)                                                                                     \
    "hint #34\n adrp x16, late_functions+8*" #number "\n ldr x16, [x16, :lo12:late_functions+8*" #number \
    "]\n br x16\n"
#else
#error "src/lib/late.c has no jump for this processor"
#endif

/* A jump keeps all arguments, also those of functions with a variable number of them. */
#define DEFINE(number, name)                                                                             \
    __asm__(".text\n.p2align 4\n.globl " #name "\n.hidden " #name "\n.type " #name ", @function\n" #name \
            ":\n" JUMP(number) ".size " #name ", .-" #name "\n");
CURL_FUNCTIONS(DEFINE)
EXPAT_FUNCTIONS(DEFINE)
CRYPTO_FUNCTIONS(DEFINE)

#define NAME(number, name) [number] = #name,
static const char *const names[FUNCTIONS] = {CURL_FUNCTIONS(NAME) EXPAT_FUNCTIONS(NAME)
                                                 CRYPTO_FUNCTIONS(NAME)};

static struct late_library {
    const char *name, *files[2]; /* the second file is tried if the first does not exist; may be NULL */
    int first, last;             /* numbers of its functions */
    bool needed_for_lists; /* only for S3 and Azure, whose lists are in XML and whose requests are signed */
    char reason[256];      /* why it is not open; "" if it is */
} libraries[] = {
    {"libcurl", {"libcurl.so.4", "libcurl-gnutls.so.4"}, 0, 9, false, ""},
    {"Expat", {"libexpat.so.1", NULL}, 10, 20, true, ""},
    {"libcrypto", {"libcrypto.so.3", "libcrypto.so.1.1"}, 21, 29, true, ""},
};

/* Sets the addresses of all functions of a library, or of none. */
static void open_library(struct late_library *library)
{
    void *handle = dlopen(library->files[0], RTLD_NOW | RTLD_LOCAL), *found[FUNCTIONS];
    const char *error = handle ? NULL : dlerror();
    snprintf(library->reason, sizeof library->reason, "%s", error ? error : "");
    if (!handle && library->files[1])
        handle = dlopen(library->files[1], RTLD_NOW | RTLD_LOCAL);
    for (int i = library->first; handle && i <= library->last; i++) {
        found[i] = dlsym(handle, names[i]);
        if (!found[i]) {
            snprintf(library->reason, sizeof library->reason, "it has no function %s", names[i]);
            return; /* the library stays open, because the process may use it */
        }
    }
    if (!handle)
        return;
    *library->reason = '\0';
    memcpy(late_functions + library->first, found + library->first,
           (size_t)(library->last - library->first + 1) * sizeof *found);
}

static void open_all(void)
{
    for (int i = 0; i < FUNCTIONS; i++)
        late_functions[i] = (void *)(uintptr_t)absent;
    for (size_t i = 0; i < COUNT_OF(libraries); i++)
        open_library(&libraries[i]);
}

enum status late_open(const char *url)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!remote_is(url) || remote_local(url))
        return STATUS_OK;
    pthread_once(&once, open_all);
    const bool lists = strncmp(url, "s3://", 5) == 0 || (strstr(url, "sig=") && strstr(url, "sv="));
    for (size_t i = 0; i < COUNT_OF(libraries); i++)
        if (*libraries[i].reason && (lists || !libraries[i].needed_for_lists))
            return status_set(STATUS_UNAVAILABLE, "path: a data set at this URL needs %s: %s",
                              libraries[i].name, libraries[i].reason);
    return STATUS_OK;
}
