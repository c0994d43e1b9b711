/*
 * The C API against a real gateway:  check SOCKET
 *
 * Stores KV, looks it up, loads it into memory of another layout and compares every byte; and makes every mistake that
 * the header names. It is C and C++.
 */
#include <kvgate.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYERS 2
#define TOKENS 36
#define FULL 32
#define HEADS 2
#define DIM 8
#define ROW (HEADS * DIM)
/* Of a token in the pages: its row, and what is none of kvgate's. */
#define PITCH (ROW + 4)
#define BLOCK 4
#define BLOCKS 16
#define POISON 0x5a5a

static const char SPACE[] = "{\"model\": \"test/capi\", \"revision\": \"1\", \"dtype\": \"float16\", \"chunk_tokens\": 8,"
                            " \"mha\": {\"layers\": 2, \"heads\": 2, \"head_dim\": 8}}";

static int failures = 0;

static void check(int is_so, int line, const char *what)
{
    if (!is_so) {
        printf("line %d: %s\n  last error: %s\n", line, what, kvgate_last_error());
        failures++;
    }
}

#define CHECK(condition) check((condition) != 0, __LINE__, #condition)

/* [layers][2][tokens][heads][head_dim], as an engine that knows no pages has it. */
static uint16_t kv[LAYERS][2][TOKENS][ROW];
/* K and V of each layer are a tensor of their own: [blocks][block tokens][heads][head_dim], with gaps. */
static uint16_t pages[LAYERS][2][BLOCKS][BLOCK][PITCH];

static uint16_t number(int layer, int k_or_v, int token, int element)
{
    return (uint16_t)(layer * 20011 + k_or_v * 10007 + token * 101 + element);
}

static kvgate_tensor whole(void)
{
    kvgate_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.address = kv;
    tensor.bytes = sizeof kv;
    tensor.axes = "LKSHD";
    tensor.shape[0] = LAYERS;
    tensor.shape[1] = 2;
    tensor.shape[2] = TOKENS;
    tensor.shape[3] = HEADS;
    tensor.shape[4] = DIM;
    tensor.element_bytes = 2;
    return tensor;
}

static kvgate_tensor paged(int layer, int k_or_v)
{
    kvgate_tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    tensor.address = pages[layer][k_or_v];
    tensor.bytes = sizeof pages[layer][k_or_v];
    tensor.axes = "BNHD";
    tensor.shape[0] = BLOCKS;
    tensor.shape[1] = BLOCK;
    tensor.shape[2] = HEADS;
    tensor.shape[3] = DIM;
    tensor.strides[3] = 2;
    tensor.strides[2] = 2 * DIM;
    tensor.strides[1] = 2 * PITCH;
    tensor.strides[0] = 2 * PITCH * BLOCK;
    tensor.element_bytes = 2;
    tensor.first_plane = (uint32_t)layer;
    tensor.row_offset = k_or_v ? 2 * DIM : 0;
    return tensor;
}

static int64_t slot_of(int token)
{
    return token * 5 % (BLOCKS * BLOCK);
}

static void store_and_load(const kvgate_session *session, const kvgate_space *space, const kvgate_prompt *prompt)
{
    kvgate_tensor tensor = whole(), tensors[2 * LAYERS];
    kvgate_memory memory = {&tensor, 1, NULL, 0}, into = {tensors, 2 * LAYERS, NULL, 0};
    kvgate_stored stored;
    int64_t slots[FULL];
    size_t tokens = 99, loaded = 99;
    int layer, k_or_v, token, element, wrong = 0, untouched = 0;

    CHECK(kvgate_lookup(session, space, prompt, 1000, 0, &tokens) == KVGATE_OK && tokens == 0);

    for (layer = 0; layer < LAYERS; layer++)
        for (k_or_v = 0; k_or_v < 2; k_or_v++)
            for (token = 0; token < TOKENS; token++)
                for (element = 0; element < ROW; element++)
                    kv[layer][k_or_v][token][element] = number(layer, k_or_v, token, element);
    CHECK(kvgate_store(session, space, prompt, &memory, 10000, &stored) == KVGATE_OK);
    CHECK(stored.tokens == FULL && stored.new_chunks == FULL / 8 && stored.refused_chunks == 0);
    CHECK(kvgate_store(session, space, prompt, &memory, 10000, &stored) == KVGATE_OK);
    CHECK(stored.tokens == FULL && stored.new_chunks == 0 && stored.refused_chunks == 0);
    CHECK(kvgate_flush(session, 60000) == KVGATE_OK);

    CHECK(kvgate_lookup(session, space, prompt, 1000, 1000, &tokens) == KVGATE_OK && tokens == FULL);
    for (layer = 0; layer < LAYERS; layer++)
        for (k_or_v = 0; k_or_v < 2; k_or_v++)
            tensors[2 * layer + k_or_v] = paged(layer, k_or_v);
    for (token = 0; token < FULL; token++)
        slots[token] = slot_of(token);
    into.slots = slots;
    into.slots_len = FULL;
    memset(pages, POISON & 0xff, sizeof pages);
    CHECK(kvgate_load(session, space, prompt, tokens, &into, 10000, &loaded) == KVGATE_OK && loaded == FULL);
    CHECK(strcmp(kvgate_last_error(), "") == 0);
    for (layer = 0; layer < LAYERS; layer++)
        for (k_or_v = 0; k_or_v < 2; k_or_v++) {
            uint16_t(*rows)[PITCH] = pages[layer][k_or_v][0];
            for (token = 0; token < FULL; token++)
                for (element = 0; element < ROW; element++)
                    wrong += rows[slot_of(token)][element] != number(layer, k_or_v, token, element);
            for (token = 0; token < BLOCKS * BLOCK; token++)
                untouched += (rows[token][0] == POISON) + (rows[token][ROW] == POISON);
        }
    CHECK(wrong == 0);
    CHECK(untouched == LAYERS * 2 * (2 * BLOCKS * BLOCK - FULL));
}

/* A prompt that nobody has stored is no error; the reason is told. */
static void load_of_nothing(const kvgate_session *session, const kvgate_space *space, const kvgate_prompt *prompt)
{
    kvgate_tensor tensor = whole();
    kvgate_memory memory = {&tensor, 1, NULL, 0};
    kvgate_prompt other = *prompt;
    size_t tokens = 99, loaded = 99;

    other.salt = (const uint8_t *)"another";
    other.salt_len = 7;
    CHECK(kvgate_lookup(session, space, &other, 1000, 0, &tokens) == KVGATE_OK && tokens == 0);
    CHECK(kvgate_load(session, space, &other, FULL, &memory, 10000, &loaded) == KVGATE_OK && loaded == 0);
    CHECK(strstr(kvgate_last_error(), "absent") != NULL);
}

/* The tenant's secret names the chunks: who lacks it finds none of them. */
static void secrets(const kvgate_session *session, const kvgate_space *plain, const kvgate_prompt *prompt)
{
    static const uint8_t own[33] = "0123456789abcdef0123456789abcdef", others[33] = "0123456789abcdef0123456789abcdeg";
    kvgate_tensor tensor = whole();
    kvgate_memory memory = {&tensor, 1, NULL, 0};
    kvgate_space *space = NULL, *again = NULL, *other = NULL, *wrong = NULL;
    kvgate_prompt secret = *prompt;
    kvgate_stored stored;
    size_t tokens = 99;

    secret.adapter = (const uint8_t *)"secret";
    secret.adapter_len = 6;
    CHECK(kvgate_space_with_secret(SPACE, own, 32, &space) == KVGATE_OK);
    CHECK(kvgate_space_with_secret(SPACE, own, 32, &again) == KVGATE_OK);
    CHECK(kvgate_space_with_secret(SPACE, others, 32, &other) == KVGATE_OK);
    CHECK(kvgate_store(session, space, &secret, &memory, 10000, &stored) == KVGATE_OK && stored.tokens == FULL);
    CHECK(kvgate_lookup(session, again, &secret, 1000, 0, &tokens) == KVGATE_OK && tokens == FULL);
    CHECK(kvgate_lookup(session, plain, &secret, 1000, 0, &tokens) == KVGATE_OK && tokens == 0);
    CHECK(kvgate_lookup(session, other, &secret, 1000, 0, &tokens) == KVGATE_OK && tokens == 0);
    CHECK(kvgate_load(session, again, &secret, FULL, &memory, 10000, &tokens) == KVGATE_OK && tokens == FULL);

    CHECK(kvgate_space_with_secret(SPACE, own, 31, &wrong) == KVGATE_ARGUMENT && wrong == NULL);
    CHECK(strstr(kvgate_last_error(), "32 bytes") != NULL && strstr(kvgate_last_error(), "0123") == NULL);
    CHECK(kvgate_space_with_secret(SPACE, NULL, 32, &wrong) == KVGATE_ARGUMENT);
    CHECK(kvgate_space_with_secret(SPACE, NULL, 0, &wrong) == KVGATE_ARGUMENT);
    kvgate_space_free(space);
    kvgate_space_free(again);
    kvgate_space_free(other);
}

static void mistakes(const kvgate_session *session, const kvgate_space *space, const kvgate_prompt *prompt)
{
    kvgate_tensor tensor = whole();
    kvgate_memory memory = {&tensor, 1, NULL, 0};
    kvgate_prompt none = {NULL, 5, NULL, 0, NULL, 0};
    kvgate_session *nobody = NULL;
    kvgate_space *wrong = NULL;
    kvgate_stored stored;
    size_t number = 77;
    int64_t slots[2] = {0, 1};

    CHECK(kvgate_connect("/nowhere/kvgate.sock", &nobody) == KVGATE_UNREACHABLE && nobody == NULL);
    CHECK(strstr(kvgate_last_error(), "kvgate serve") != NULL);
    CHECK(kvgate_connect("/nowhere/kvgate.sock", NULL) == KVGATE_ARGUMENT);
    CHECK(kvgate_connect("\xff", &nobody) == KVGATE_ARGUMENT);
    CHECK(kvgate_space_new("{}", &wrong) == KVGATE_ARGUMENT && wrong == NULL);
    CHECK(kvgate_space_new(NULL, &wrong) == KVGATE_ARGUMENT);
    CHECK(kvgate_space_chunk_tokens(NULL) == 0);
    kvgate_space_free(NULL);
    kvgate_disconnect(NULL);

    CHECK(kvgate_lookup(NULL, space, prompt, 1000, 0, &number) == KVGATE_ARGUMENT);
    CHECK(kvgate_lookup(session, NULL, prompt, 1000, 0, &number) == KVGATE_ARGUMENT);
    CHECK(kvgate_lookup(session, space, NULL, 1000, 0, &number) == KVGATE_ARGUMENT);
    CHECK(kvgate_lookup(session, space, &none, 1000, 0, &number) == KVGATE_ARGUMENT);
    CHECK(strstr(kvgate_last_error(), "prompt.tokens is NULL") != NULL);
    CHECK(kvgate_lookup(session, space, prompt, 1000, 0, NULL) == KVGATE_ARGUMENT);

    CHECK(kvgate_load(session, space, prompt, FULL + 8, &memory, 1000, &number) == KVGATE_ARGUMENT);
    memory.slots = slots;
    memory.slots_len = 2;
    CHECK(kvgate_load(session, space, prompt, FULL, &memory, 1000, &number) == KVGATE_ARGUMENT);
    CHECK(strstr(kvgate_last_error(), "2 places") != NULL);
    memory.slots = NULL;
    tensor.bytes -= 2;
    CHECK(kvgate_store(session, space, prompt, &memory, 1000, &stored) == KVGATE_ARGUMENT);
    tensor = whole();
    tensor.shape[0] = 1;
    CHECK(kvgate_store(session, space, prompt, &memory, 1000, &stored) == KVGATE_ARGUMENT);
    CHECK(strstr(kvgate_last_error(), "layer 1") != NULL);
    tensor.axes = NULL;
    CHECK(kvgate_store(session, space, prompt, &memory, 1000, &stored) == KVGATE_ARGUMENT);
    tensor.axes = "LKSHDLKSHD";
    CHECK(kvgate_store(session, space, prompt, &memory, 1000, &stored) == KVGATE_ARGUMENT);
    tensor = whole();
    tensor.address = NULL;
    CHECK(kvgate_store(session, space, prompt, &memory, 1000, &stored) == KVGATE_ARGUMENT);
    CHECK(number == 77);
}

int main(int count, char **arguments)
{
    uint32_t tokens[TOKENS];
    kvgate_prompt prompt = {tokens, TOKENS, NULL, 0, NULL, 0};
    kvgate_session *session = NULL;
    kvgate_space *space = NULL;
    int token;

    if (count != 2) {
        printf("usage: check SOCKET\n");
        return 2;
    }
    for (token = 0; token < TOKENS; token++)
        tokens[token] = (uint32_t)(1000 + token);
    /* Each run has a prompt of its own. */
    prompt.salt = (const uint8_t *)arguments[0];
    prompt.salt_len = strlen(arguments[0]);

    CHECK(kvgate_connect(arguments[1], &session) == KVGATE_OK);
    CHECK(kvgate_space_new(SPACE, &space) == KVGATE_OK);
    if (session == NULL || space == NULL)
        return 1;
    CHECK(kvgate_space_chunk_tokens(space) == 8);
    store_and_load(session, space, &prompt);
    load_of_nothing(session, space, &prompt);
    secrets(session, space, &prompt);
    mistakes(session, space, &prompt);
    kvgate_space_free(space);
    kvgate_disconnect(session);
    printf("libkvgate %s: %d wrong\n", kvgate_version(), failures);
    return failures != 0;
}
