; What CuPy's C allocator calls: its `param` carries the current stream. NULL means no memory; the caller raises.

@states = external global [0 x i64]       ; addresses of states by device

@core_malloc = external global i64        ; the address of what serves (state, bytes, stream): address, 0 for no memory
declare void @core_free(i64, i64)         ; (state, address)

define ptr @allocate(ptr %stream, i64 %size, i32 %device) {
  %index = sext i32 %device to i64
  %row = getelementptr i64, ptr @states, i64 %index
  %state = load i64, ptr %row
  %raw = ptrtoint ptr %stream to i64
  %core = load i64, ptr @core_malloc
  %malloc = inttoptr i64 %core to ptr
  %address = call i64 %malloc(i64 %state, i64 %size, i64 %raw)
  %result = inttoptr i64 %address to ptr
  ret ptr %result
}

define void @free(ptr %stream, ptr %pointer, i32 %device) {
  %index = sext i32 %device to i64
  %row = getelementptr i64, ptr @states, i64 %index
  %state = load i64, ptr %row
  %address = ptrtoint ptr %pointer to i64
  call void @core_free(i64 %state, i64 %address)
  ret void
}
