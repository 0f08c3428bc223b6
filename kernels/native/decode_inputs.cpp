// Inputs of the tokens that decoding rows compute, gathered in one call.
//
// A decode step of the demo model takes 0.5 ms, of which numpy's and torch's ops of a few numbers each took 90 us here.
#include <cstdint>
#include <cstring>

// Python fills this struct: kernels/native/decode_inputs.py declares the same fields in the same order.
struct RowTables {
  const int32_t* token_ids;     // [R, L]
  const int32_t* lens;          // [R], known tokens
  const int32_t* block_tables;  // [R, M]
  int64_t token_stride, table_stride, block_size;
};

extern "C" {

// Gathers the newest token of each of n rows, and the counts[i] - 1 drafted ones behind it. The
// outputs are [T], those of a row adjacent, and tables [T, width].
void quire_gather_decodes(const RowTables* rows, const int64_t* row_ids, const int32_t* counts, int64_t num_rows,
                          int64_t width, int64_t* token_rows, int32_t* token_ids, int64_t* positions, int64_t* slots,
                          int32_t* seq_lens, int32_t* tables) {
  int64_t t = 0;
  for (int64_t i = 0; i < num_rows; i++) {
    const int64_t row = row_ids[i], first = rows->lens[row] - 1, end = first + counts[i];
    const int32_t* table = rows->block_tables + row * rows->table_stride;
    for (int64_t position = first; position < end; position++, t++) {
      token_rows[t] = row;
      token_ids[t] = rows->token_ids[row * rows->token_stride + position];
      positions[t] = position;
      slots[t] = table[position / rows->block_size] * rows->block_size + position % rows->block_size;
      seq_lens[t] = int32_t(position + 1);
      memcpy(tables + t * width, table, width * sizeof(int32_t));
    }
  }
}
}
