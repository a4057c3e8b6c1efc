#include "data/md5.h"

#include <stdio.h>

#ifdef HAVE_CRYPTO
#include <openssl/evp.h>
#endif

#ifdef HAVE_CRYPTO

enum status md5_begin(void **md5)
{
    *md5 = EVP_MD_CTX_new();
    return *md5 && EVP_DigestInit_ex(*md5, EVP_md5(), NULL)
               ? STATUS_OK
               : status_set(STATUS_FAILED, "libcrypto has no md5 here (FIPS mode?); build with CRYPTO=0");
}

enum status md5_add(void *md5, const void *bytes, size_t count)
{
    return EVP_DigestUpdate(md5, bytes, count) ? STATUS_OK
                                               : status_set(STATUS_FAILED, "libcrypto: md5 failed");
}

enum status md5_end(void *md5, char hex[33])
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned length = 0;
    if (!EVP_DigestFinal_ex(md5, digest, &length) || length != 16)
        return status_set(STATUS_FAILED, "libcrypto: md5 failed");
    for (unsigned i = 0; i < length; i++)
        snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    return STATUS_OK;
}

void md5_free(void *md5)
{
    EVP_MD_CTX_free(md5);
}

#else

enum status md5_begin(void **md5)
{
    *md5 = NULL;
    return STATUS_OK;
}

enum status md5_add(void *md5, const void *bytes, size_t count)
{
    (void)md5, (void)bytes, (void)count;
    return STATUS_OK;
}

enum status md5_end(void *md5, char hex[33])
{
    (void)md5;
    hex[0] = '\0';
    return STATUS_OK;
}

void md5_free(void *md5)
{
    (void)md5;
}

#endif
