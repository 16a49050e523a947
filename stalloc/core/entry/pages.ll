; Pages of the device for a pool of CuPy's: no Python runs between the driver and the pool, so none is ever lost.

declare i32 @cuMemCreate(ptr, i64, ptr, i64)
declare i32 @cuMemRelease(i64)

; a page of `size` bytes with the driver's `properties`: its handle, null if there is none; the word after the
; properties gets the driver's status
define i64 @create(ptr %properties, i64 %size, i32 %device) {
  %handle = alloca i64
  store i64 0, ptr %handle
  %status = call i32 @cuMemCreate(ptr %handle, i64 %size, ptr %properties, i64 0)
  %status.at = getelementptr i8, ptr %properties, i64 32
  store i32 %status, ptr %status.at
  %failed = icmp ne i32 %status, 0
  %made = load i64, ptr %handle
  %answer = select i1 %failed, i64 0, i64 %made
  ret i64 %answer
}

define void @release(ptr %properties, i64 %handle, i32 %device) {
  %none = icmp eq i64 %handle, 0
  br i1 %none, label %done, label %some
some:
  %status = call i32 @cuMemRelease(i64 %handle)
  br label %done
done:
  ret void
}
