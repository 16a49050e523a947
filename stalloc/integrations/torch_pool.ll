; What a torch.cuda.MemPool calls: segments come from the driver. Nothing enters Python.

declare i32 @cuMemAlloc_v2(ptr, i64)
declare i32 @cuMemFree_v2(i64)

define ptr @allocate(i64 %size, i32 %device, ptr %stream) {
  %place = alloca i64
  store i64 0, ptr %place
  %status = call i32 @cuMemAlloc_v2(ptr %place, i64 %size)
  %failed = icmp ne i32 %status, 0
  %address = load i64, ptr %place
  %served = inttoptr i64 %address to ptr
  %result = select i1 %failed, ptr null, ptr %served
  ret ptr %result
}

define void @free(ptr %pointer, i64 %size, i32 %device, ptr %stream) {
  %address = ptrtoint ptr %pointer to i64
  %status = call i32 @cuMemFree_v2(i64 %address)
  ret void
}
