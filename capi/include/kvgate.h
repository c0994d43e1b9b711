/*
 * kvgate for C and C++: which tokens of a prompt the gateway of this node has, into memory and out of it.
 *
 * Link with -lkvgate (pkg-config kvgate). docs/C.md explains the calls with an example.
 *
 * Every call that can fail returns a kvgate_status; kvgate_last_error() says what was wrong and what to do. A call has
 * ended when it returns: it does not touch the caller's memory any more. Sessions and spaces may be used by many threads
 * at a time. A process that forks connects after that.
 */
#ifndef KVGATE_H
#define KVGATE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvgate_status {
    KVGATE_OK = 0,
    /* An argument can't be: NULL, text that is not UTF-8, a tensor that does not fit the space. */
    KVGATE_ARGUMENT = 1,
    /* No gateway answers at the socket, or it did not answer in time. */
    KVGATE_UNREACHABLE = 2,
    /* The gateway refuses the call. */
    KVGATE_REFUSED = 3,
    /* A mistake of kvgate's own: report it. */
    KVGATE_INTERNAL = 4
} kvgate_status;

/* A session with the node's gateway. When the gateway starts anew, the next call finds the new one. */
typedef struct kvgate_session kvgate_session;

/* What must be equal for two chunks of KV to be interchangeable. */
typedef struct kvgate_space kvgate_space;

/* Token ids, and what else their KV depends on. Only full chunks of kvgate_space_chunk_tokens() are kept. */
typedef struct kvgate_prompt {
    const uint32_t *tokens;
    size_t tokens_len;
    /* May be NULL, as may be the adapter. */
    const uint8_t *salt;
    size_t salt_len;
    const uint8_t *adapter;
    size_t adapter_len;
} kvgate_prompt;

#define KVGATE_DIMS 8

/*
 * A tensor in memory of this process, by the meaning of its axes: a letter for each dimension, in the order of the shape.
 *
 *   L      layer, in the order of the space      H       KV head
 *   S      token                                 K       0: K, 1: V
 *   B, N   block, and token in the block         C or D  element: of a row, or of K or V alone
 *
 * "LKSHD" is [layers][2][tokens][heads][head_dim]. Elements of a row lie side by side.
 */
typedef struct kvgate_tensor {
    void *address;
    /* From there on. */
    uint64_t bytes;
    const char *axes;
    uint64_t shape[KVGATE_DIMS];
    /* Bytes from one index to the next; all 0: contiguous. */
    uint64_t strides[KVGATE_DIMS];
    uint32_t element_bytes;
    /* The first of its layers, in the space. It has as many as axis L, or one. */
    uint32_t first_plane;
    /* Bytes of a row that come before: where K and V are tensors of their own, those of K. */
    uint32_t row_offset;
} kvgate_tensor;

/* All layers and heads of a space. */
typedef struct kvgate_memory {
    const kvgate_tensor *tensors;
    size_t tensors_len;
    /* For each token block * block tokens + token in the block; negative: not loaded. NULL: token t is at t. */
    const int64_t *slots;
    size_t slots_len;
} kvgate_memory;

typedef struct kvgate_stored {
    /* Leading tokens that the gateway has now: whole chunks. */
    size_t tokens;
    /* Chunks that it did not have before. */
    size_t new_chunks;
    /* Chunks for which it had no room: store them again later. */
    size_t refused_chunks;
} kvgate_stored;

/* Of the library, such as "0.1.0". */
const char *kvgate_version(void);

/* What was wrong in this thread's last call that failed, and what to do. Valid until the thread's next call; never NULL. */
const char *kvgate_last_error(void);

/* socket: of `kvgate serve`; NULL: KVGATE__API__SOCKET, then /run/kvgate/kvgate.sock. It must be root's or this user's,
 * or of the user id in KVGATE__API__SOCKET_OWNER. */
kvgate_status kvgate_connect(const char *socket, kvgate_session **session);

/* Ends the session; no other call may use it. NULL is left alone. */
void kvgate_disconnect(kvgate_session *session);

/* json: docs/FORMAT.md section 1. It must be of the kind "full". */
kvgate_status kvgate_space_new(const char *json, kvgate_space **space);
/* The same of a tenant with a secret (docs/KEYS.md), which keys the names of its chunks: secret_len is 32. The library keeps a
 * copy until kvgate_space_free. */
kvgate_status kvgate_space_with_secret(const char *json, const uint8_t *secret, size_t secret_len, kvgate_space **space);
/* 0: space is NULL. */
uint32_t kvgate_space_chunk_tokens(const kvgate_space *space);
void kvgate_space_free(kvgate_space *space);

/* *tokens: how many leading tokens the gateway has, in whole chunks; those that it could not tell of in deadline_ms count
 * as absent. Chunks in the node's memory stay there for pin_ms. */
kvgate_status kvgate_lookup(const kvgate_session *session, const kvgate_space *space, const kvgate_prompt *prompt,
                            uint64_t deadline_ms, uint64_t pin_ms, size_t *tokens);

/* Loads the prompt's first `tokens` tokens (whole chunks, as kvgate_lookup tells) into the memory, which nothing else may
 * touch meanwhile. *loaded: how many leading tokens are there now; those behind are undefined. A chunk that is gone, late
 * or damaged is no error: then kvgate_last_error() has the reason. */
kvgate_status kvgate_load(const kvgate_session *session, const kvgate_space *space, const kvgate_prompt *prompt, size_t tokens,
                          const kvgate_memory *memory, uint64_t deadline_ms, size_t *loaded);

/* Stores the prompt's full chunks out of the memory, which may not change meanwhile. Then every lookup finds them, and S3
 * gets them in the background. Chunks for which there is no room wait for it, until deadline_ms. Those that found none are
 * no error: stored counts them. Nor are those that are missing for another reason: then kvgate_last_error() has it. */
kvgate_status kvgate_store(const kvgate_session *session, const kvgate_space *space, const kvgate_prompt *prompt,
                           const kvgate_memory *memory, uint64_t deadline_ms, kvgate_stored *stored);

/* Waits until S3 has every chunk that was stored before. */
kvgate_status kvgate_flush(const kvgate_session *session, uint64_t deadline_ms);

#ifdef __cplusplus
}
#endif

#endif
