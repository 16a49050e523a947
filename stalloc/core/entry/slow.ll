; Entering Python from a thread that runs the core, and coming back whatever happens there.
;
; A plain call into Python is not enough: the interpreter may have ended, or end while this thread waits for the GIL; the
; thread may be in the middle of somebody else's error handling; and a signal handler may raise at the first line of any
; Python function, which must neither get lost nor end what has to be done as a whole.
;
; What the linker sets: where the Python objects are that are called, and numbers that depend on the machine.

@handler = external constant ptr          ; called as handler(device, request, argument)
@again = external constant ptr            ; called as again(device, request, argument, errors); null: there is none
@format = external constant [4 x i8]      ; "LLL"
@format_again = external constant [5 x i8] ; "LLLO"
@gettid_number = external constant i64    ; the C library has the call by name from 2.30 on only
@any_exception = external constant ptr    ; BaseException
@recursion_error = external constant ptr  ; RecursionError

declare i64 @syscall(i64, ...)
declare i32 @getpid()
declare i32 @pause()
declare i32 @__gcc_personality_v0(...)

declare i32 @Py_IsInitialized()
declare ptr @PyGILState_GetThisThreadState()
declare i32 @PyGILState_Check()
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare ptr @PyEval_SaveThread()
declare void @PyErr_Fetch(ptr, ptr, ptr)
declare void @PyErr_Restore(ptr, ptr, ptr)
declare void @PyErr_Clear()
declare void @PyErr_NormalizeException(ptr, ptr, ptr)
declare i32 @PyErr_GivenExceptionMatches(ptr, ptr)
declare void @PyErr_SetObject(ptr, ptr)
declare void @PyErr_SetInterrupt()
declare i32 @PyException_SetTraceback(ptr, ptr)
declare ptr @PyList_New(i64)
declare i32 @PyList_Append(ptr, ptr)
declare ptr @PyList_GetItem(ptr, i64)
declare i64 @PyList_Size(ptr)
declare i32 @PyList_SetSlice(ptr, i64, i64, ptr)
declare ptr @PyObject_CallFunction(ptr, ptr, ...)
declare ptr @PyObject_Type(ptr)
declare i64 @PyLong_AsLongLong(ptr)
declare void @Py_IncRef(ptr)
declare void @Py_DecRef(ptr)
declare i32 @Py_AddPendingCall(ptr, ptr)
declare i32 @Py_GetRecursionLimit()
declare void @Py_SetRecursionLimit(i32)
declare i32 @PyThreadState_SetAsyncExc(i64, ptr)
declare i64 @PyThread_get_thread_ident()

; Ask Python for what a request needs: 1 to try again, 0 if there is no help.
define i64 @slow(i64 %device, i64 %request, i64 %argument) personality ptr @__gcc_personality_v0 {
entry:
  %there = call i32 @Py_IsInitialized()
  %gettid = load i64, ptr @gettid_number
  %tid.long = call i64 (i64, ...) @syscall(i64 %gettid)
  %tid = trunc i64 %tid.long to i32
  %pid = call i32 @getpid()
  %main = icmp eq i32 %tid, %pid
  %gone = icmp eq i32 %there, 0
  br i1 %gone, label %late, label %open
late:                                  ; the interpreter has ended: there is no entering it any more
  br i1 %main, label %refuse, label %other
other:
  %late.state = call ptr @PyGILState_GetThisThreadState()
  %late.foreign = icmp eq ptr %late.state, null
  br i1 %late.foreign, label %refuse, label %daemon
refuse:                                ; the main thread, or a thread that Python never knew
  ret i64 0
daemon:                                ; a thread of Python's: it waits for the end of the process
  %held = call i32 @PyGILState_Check()
  %holds = icmp ne i32 %held, 0
  br i1 %holds, label %save, label %wait
save:
  %saved = call ptr @PyEval_SaveThread()
  br label %wait
wait:                                  ; (before 3.14 it would be unwound, and abort in C++ code that catches all)
  %interrupted = call i32 @pause()
  br label %wait
open:                                  ; its own thread gets errors at once, others hand them to the main thread
  %state = call ptr @PyGILState_GetThisThreadState()
  %foreign = icmp eq ptr %state, null
  %raises.later = or i1 %main, %foreign
  %answer = invoke i64 @enter(i64 %device, i64 %request, i64 %argument, i1 %raises.later)
    to label %answered unwind label %unwound
answered:
  ret i64 %answer
unwound:                               ; the interpreter ended while this thread waited for the GIL
  %unwinding = landingpad { ptr, i32 } cleanup
  br label %wait
}

; The visit itself; `raises.later`: an error is for the main thread, not for this one.
define i64 @enter(i64 %device, i64 %request, i64 %argument, i1 %raises.later) noinline uwtable {
entry:
  %type = alloca ptr
  %value = alloca ptr
  %trace = alloca ptr
  %error.type = alloca ptr
  %error.value = alloca ptr
  %error.trace = alloca ptr
  %gil = call i32 @PyGILState_Ensure()
  call void @PyErr_Fetch(ptr %type, ptr %value, ptr %trace)
  %handler = load ptr, ptr @handler
  %again = load ptr, ptr @again
  %any = load ptr, ptr @any_exception
  %recursion = load ptr, ptr @recursion_error
  %errors = call ptr @PyList_New(i64 0)
  %no.list = icmp eq ptr %errors, null
  br i1 %no.list, label %no.memory, label %first
no.memory:                             ; not even a list of errors: the answer is 0
  call void @PyErr_Clear()
  br label %left
first:
  %first.result = call ptr (ptr, ptr, ...) @PyObject_CallFunction(
    ptr %handler, ptr @format, i64 %device, i64 %request, i64 %argument)
  br label %look
retry:
  %more = call ptr (ptr, ptr, ...) @PyObject_CallFunction(
    ptr %again, ptr @format_again, i64 %device, i64 %request, i64 %argument, ptr %errors)
  br label %look
look:                                  ; a result, or one more error
  %failures = phi i64 [0, %first], [%failures.now, %retry]
  %room = phi i32 [0, %first], [%room.now, %retry]
  %result = phi ptr [%first.result, %first], [%more, %retry]
  %failed = icmp eq ptr %result, null
  br i1 %failed, label %caught, label %served
caught:                                ; keep it in the list, with its traceback
  call void @PyErr_Fetch(ptr %error.type, ptr %error.value, ptr %error.trace)
  call void @PyErr_NormalizeException(ptr %error.type, ptr %error.value, ptr %error.trace)
  %error = load ptr, ptr %error.value
  %its.type = load ptr, ptr %error.type
  %its.trace = load ptr, ptr %error.trace
  %traced = icmp ne ptr %its.trace, null
  br i1 %traced, label %attach, label %note
attach:
  %attached = call i32 @PyException_SetTraceback(ptr %error, ptr %its.trace)
  br label %note
note:
  %noted = call i32 @PyList_Append(ptr %errors, ptr %error)
  call void @PyErr_Clear()
  %deep = call i32 @PyErr_GivenExceptionMatches(ptr %error, ptr %recursion)
  call void @Py_DecRef(ptr %its.type)
  call void @Py_DecRef(ptr %error)
  call void @Py_DecRef(ptr %its.trace)
  %failures.now = add i64 %failures, 1
  %is.deep = icmp ne i32 %deep, 0
  %no.room = icmp eq i32 %room, 0
  %wants.room = and i1 %is.deep, %no.room
  br i1 %wants.room, label %give.room, label %on
give.room:                             ; the limit of recursion was reached: allow some more calls, once
  %now = call i32 @Py_GetRecursionLimit()
  %higher = add i32 %now, 200
  call void @Py_SetRecursionLimit(i32 %higher)
  br label %on
on:                                    ; up to 100 errors: those that come again whatever is done
  %room.now = phi i32 [%room, %note], [200, %give.room]
  %few = icmp ult i64 %failures.now, 100
  %can = icmp ne ptr %again, null
  %goes.on = and i1 %few, %can
  br i1 %goes.on, label %retry, label %ended
served:                                ; an answer that is no integer counts as -1, its error is dropped
  %answer.served = call i64 @PyLong_AsLongLong(ptr %result)
  call void @Py_DecRef(ptr %result)
  call void @PyErr_Clear()
  br label %ended
ended:
  %answer = phi i64 [0, %on], [%answer.served, %served]
  %room.given = phi i32 [%room.now, %on], [%room, %served]
  %had.room = icmp ne i32 %room.given, 0
  br i1 %had.room, label %take.room, label %tell
take.room:                             ; what the program itself set meanwhile stays
  %then = call i32 @Py_GetRecursionLimit()
  %lower = sub i32 %then, 200
  call void @Py_SetRecursionLimit(i32 %lower)
  br label %tell
tell:                                  ; the last error that `again` left is raised where Python goes on
  %size = call i64 @PyList_Size(ptr %errors)
  %some = icmp sgt i64 %size, 0
  br i1 %some, label %last, label %told
last:
  %index = sub i64 %size, 1
  %item = call ptr @PyList_GetItem(ptr %errors, i64 %index)
  %raisable = call i32 @PyErr_GivenExceptionMatches(ptr %item, ptr %any)
  %is.raisable = icmp ne i32 %raisable, 0
  br i1 %is.raisable, label %choose, label %told
choose:
  br i1 %raises.later, label %pending, label %here
pending:                               ; by the main thread, as soon as it runs Python code
  call void @Py_IncRef(ptr %item)
  %added = call i32 @Py_AddPendingCall(ptr @raise_later, ptr %item)
  %full = icmp ne i32 %added, 0
  br i1 %full, label %no.pending, label %told
no.pending:                            ; its queue is full: at least a KeyboardInterrupt
  call void @Py_DecRef(ptr %item)
  call void @PyErr_SetInterrupt()
  br label %told
here:                                  ; by this thread; only a class can be raised so
  %its.class = call ptr @PyObject_Type(ptr %item)
  %self = call i64 @PyThread_get_thread_ident()
  %threads = call i32 @PyThreadState_SetAsyncExc(i64 %self, ptr %its.class)
  call void @Py_DecRef(ptr %its.class)
  br label %told
told:                                  ; an error's traceback may hold the list: empty it first
  %emptied = call i32 @PyList_SetSlice(ptr %errors, i64 0, i64 %size, ptr null)
  call void @Py_DecRef(ptr %errors)
  br label %left
left:                                  ; the error indicator is what it was before
  %answer.left = phi i64 [0, %no.memory], [%answer, %told]
  %t = load ptr, ptr %type
  %v = load ptr, ptr %value
  %b = load ptr, ptr %trace
  call void @PyErr_Restore(ptr %t, ptr %v, ptr %b)
  call void @PyGILState_Release(i32 %gil)
  ret i64 %answer.left
}

; A pending call of Python's: raise an error in the main thread.
define i32 @raise_later(ptr %error) {
  %type = call ptr @PyObject_Type(ptr %error)
  call void @PyErr_SetObject(ptr %type, ptr %error)
  call void @Py_DecRef(ptr %type)
  call void @Py_DecRef(ptr %error)
  ret i32 -1
}
