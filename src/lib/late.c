/* Opens libcurl, Expat and libcrypto when a data set at a URL needs them. The library can therefore be
 * loaded, and used for everything else, on machines without them. The functions below have the names of the
 * functions of these libraries, and jump to them. They are visible only within libfdsl. */
#include <dlfcn.h>
#include <string.h>

#include "core/portable.h"
#include "machine/host.h"
#include "data/remote.h"
#include "data/http.h"
#include "lib/call.h"

#define CURL_FUNCTIONS(X)           \
    X(0, curl_easy_cleanup)         \
    X(1, curl_easy_init)            \
    X(2, curl_easy_reset)           \
    X(3, curl_easy_setopt)          \
    X(4, curl_easy_strerror)        \
    X(5, curl_getdate)              \
    X(6, curl_global_init)          \
    X(7, curl_multi_add_handle)     \
    X(8, curl_multi_cleanup)        \
    X(9, curl_multi_info_read)      \
    X(10, curl_multi_init)          \
    X(11, curl_multi_perform)       \
    X(12, curl_multi_remove_handle) \
    X(13, curl_multi_wait)          \
    X(14, curl_slist_append)        \
    X(15, curl_slist_free_all)
#define EXPAT_FUNCTIONS(X)                \
    X(16, XML_ErrorString)                \
    X(17, XML_GetCurrentByteIndex)        \
    X(18, XML_GetErrorCode)               \
    X(19, XML_Parse)                      \
    X(20, XML_ParserCreateNS)             \
    X(21, XML_ParserFree)                 \
    X(22, XML_SetCharacterDataHandler)    \
    X(23, XML_SetElementHandler)          \
    X(24, XML_SetStartDoctypeDeclHandler) \
    X(25, XML_SetUserData)                \
    X(26, XML_StopParser)
#define CRYPTO_FUNCTIONS(X)   \
    X(27, EVP_Digest)         \
    X(28, EVP_DigestFinal_ex) \
    X(29, EVP_DigestInit_ex)  \
    X(30, EVP_DigestUpdate)   \
    X(31, EVP_MD_CTX_free)    \
    X(32, EVP_MD_CTX_new)     \
    X(33, EVP_md5)            \
    X(34, EVP_sha256)         \
    X(35, HMAC)               \
    X(36, EVP_get_digestbyname)
#define FUNCTIONS 37

/* Stands for each function before its library is open. Callers treat NULL as a failure. */
static void *absent(void)
{
    return NULL;
}

#define ABSENT(number, name) [number] = absent,

/* The addresses of the functions, by their numbers. The assembler code below uses it by this name. */
void *(*late_functions[FUNCTIONS])(void) = {CURL_FUNCTIONS(ABSENT) EXPAT_FUNCTIONS(ABSENT)
                                                CRYPTO_FUNCTIONS(ABSENT)};

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
    {"libcurl", {"libcurl.so.4", "libcurl-gnutls.so.4"}, 0, 15, false, ""},
    {"Expat", {"libexpat.so.1", NULL}, 16, 26, true, ""},
    {"libcrypto", {"libcrypto.so.3", "libcrypto.so.1.1"}, 27, 36, true, ""},
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

/* Opens all libraries once. Without the lock, a child that begins in this time would inherit the locks of the
 * loader. */
static void open_all(void)
{
    static bool opened;
    process_lock();
    for (size_t i = 0; !opened && i < COUNT_OF(libraries); i++)
        open_library(&libraries[i]);
    opened = true;
    process_unlock();
}

enum status late_open(const char *url)
{
    if (url && (!remote_is(url) || remote_local(url)))
        return STATUS_OK;
    open_all();
    if (!url)
        return STATUS_OK;
    const bool lists = s3_is_url(url) || (strstr(url, "sig=") && strstr(url, "sv="));
    for (size_t i = 0; i < COUNT_OF(libraries); i++)
        if (*libraries[i].reason && (lists || !libraries[i].needed_for_lists))
            return status_set(STATUS_UNAVAILABLE, "path: a data set at this URL needs %s: %s",
                              libraries[i].name, libraries[i].reason);
    return STATUS_OK;
}
