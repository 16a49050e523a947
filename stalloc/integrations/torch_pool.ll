; What a torch.cuda.MemPool calls: segments come from the driver, and are counted. Nothing enters Python.

@held = external global i64               ; bytes held from the device now
@refused = external global i64            ; how many times the device had no more

declare i32 @cuMemAlloc_v2(ptr, i64)
declare i32 @cuMemFree_v2(i64)

define ptr @allocate(i64 %size, i32 %device, ptr %stream) {
entry:
  %place = alloca i64
  store i64 0, ptr %place
  %status = call i32 @cuMemAlloc_v2(ptr %place, i64 %size)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %none, label %done
none:
  %before = atomicrmw add ptr @refused, i64 1 seq_cst
  ret ptr null
done:
  %more = atomicrmw add ptr @held, i64 %size seq_cst
  %address = load i64, ptr %place
  %result = inttoptr i64 %address to ptr
  ret ptr %result
}

define void @free(ptr %pointer, i64 %size, i32 %device, ptr %stream) {
  %address = ptrtoint ptr %pointer to i64
  %status = call i32 @cuMemFree_v2(i64 %address)
  %less = atomicrmw sub ptr @held, i64 %size seq_cst
  ret void
}
