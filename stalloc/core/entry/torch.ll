; What torch's pluggable allocator calls: it has no context argument, so the state is found by the device's number.

@states = external global [0 x i64]             ; addresses of states by device
@oom_text = external constant i64               ; bytes from the begin of a state to fields of it: see records.py
@oom_text_length = external constant i64
@driver_error = external constant i64
@file_name = external constant [8 x i8]         ; where the error says that it comes from

@core_malloc = external global i64              ; the address of what serves (state, bytes, stream): address, 0 for no memory
declare void @core_free(i64, i64)               ; (state, address)

; The exceptions are objects of C++ (Itanium C++ ABI, 2.5.2): a vtable begins with the offset to the top and the type;
; the pointer in an object leads to what follows: the complete destructor, the deleting one, and so on.
%location = type { ptr, ptr, i32 }              ; c10::SourceLocation
%string = type [4 x i64]                        ; std::string, of either kind: wheels before torch 2.7 have the older
@_ZTVN3c1016OutOfMemoryErrorE = external constant [5 x ptr]
@_ZTIN3c1016OutOfMemoryErrorE = external constant ptr
@_ZTVN3c105ErrorE = external constant [5 x ptr]
@_ZTIN3c105ErrorE = external constant ptr
declare void @construct_error(ptr, ptr byval(%location) align 8, ptr) ; c10::Error(SourceLocation, std::string)
declare void @construct_string(ptr, ptr, i64, ptr) ; std::string(const char*, size_t, const allocator&)
declare ptr @__cxa_allocate_exception(i64)
declare void @__cxa_throw(ptr, ptr, ptr)

; torch takes a NULL silently, so an allocation without memory throws.
define ptr @allocate(i64 %size, i32 %device, ptr %stream) uwtable {
entry:
  %index = sext i32 %device to i64
  %row = getelementptr i64, ptr @states, i64 %index
  %state = load i64, ptr %row
  %raw = ptrtoint ptr %stream to i64
  %core = load i64, ptr @core_malloc
  %malloc = inttoptr i64 %core to ptr
  %address = call i64 %malloc(i64 %state, i64 %size, i64 %raw)
  %none = icmp eq i64 %address, 0
  %wanted = icmp sgt i64 %size, 0
  %failed = and i1 %none, %wanted
  br i1 %failed, label %throw, label %done
done:
  %result = inttoptr i64 %address to ptr
  ret ptr %result
throw:
  call void @throw(i64 %state)
  unreachable
}

define void @free(ptr %pointer, i64 %size, i32 %device, ptr %stream) {
  %index = sext i32 %device to i64
  %row = getelementptr i64, ptr @states, i64 %index
  %state = load i64, ptr %row
  %address = ptrtoint ptr %pointer to i64
  call void @core_free(i64 %state, i64 %address)
  ret void
}

; Throw c10::OutOfMemoryError with the text that the state points to; c10::Error where the driver failed.
define void @throw(i64 %state) noinline uwtable {
  %base = inttoptr i64 %state to ptr
  %text.offset = load i64, ptr @oom_text
  %length.offset = load i64, ptr @oom_text_length
  %error.offset = load i64, ptr @driver_error
  %text.field = getelementptr i8, ptr %base, i64 %text.offset
  %length.field = getelementptr i8, ptr %base, i64 %length.offset
  %error.field = getelementptr i8, ptr %base, i64 %error.offset
  %text.address = load i64, ptr %text.field
  %length = load i64, ptr %length.field
  %from = inttoptr i64 %text.address to ptr
  %message = alloca %string, align 8
  %allocator = alloca i8
  call void @construct_string(ptr %message, ptr %from, i64 %length, ptr %allocator)
  %where = alloca %location, align 8
  store ptr @file_name, ptr %where
  %where.file = getelementptr %location, ptr %where, i32 0, i32 1
  store ptr @file_name, ptr %where.file
  %where.line = getelementptr %location, ptr %where, i32 0, i32 2
  store i32 0, ptr %where.line
  %error = call ptr @__cxa_allocate_exception(i64 1024)
  call void @construct_error(ptr %error, ptr byval(%location) align 8 %where, ptr %message)
  %status = load i64, ptr %error.field
  %failed = icmp ne i64 %status, 0
  %table = select i1 %failed, ptr @_ZTVN3c105ErrorE, ptr @_ZTVN3c1016OutOfMemoryErrorE
  %vtable = getelementptr i8, ptr %table, i64 16
  store ptr %vtable, ptr %error
  %destroy = load ptr, ptr %vtable
  %type = select i1 %failed, ptr @_ZTIN3c105ErrorE, ptr @_ZTIN3c1016OutOfMemoryErrorE
  call void @__cxa_throw(ptr %error, ptr %type, ptr %destroy)
  unreachable
}
