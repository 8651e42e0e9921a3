"""From values to messages: requests, results and iterations as the wire has them."""

from collections.abc import Iterable

from kvkeeper.engine.v1 import engine_service_pb2 as pb

from ..loop.stats import Iteration
from ..messages import make_logprobs, make_usage
from ..outputs.generation import Generation
from ..scheduler.plan import Task
from .ownership import shown_id
from .submission import Submission


def request_info(generation: Generation, now: float) -> pb.RequestInfo:
    """A request as ListRequests shows it."""
    return pb.RequestInfo(
        request_id=shown_id(generation.request.request_id),
        state=f"REQUEST_STATE_{generation.state.name}",
        prompt_tokens=len(generation.request.prompt),
        new_tokens=generation.request.num_new_tokens,
        n=generation.num_returned,
        priority=generation.request.priority,
        age_ms=int((now - generation.started_at) * 1000),
        session_id=generation.session_id,
        metadata=generation.metadata,
    )


def make_result(generation: Generation, submission: Submission, now: float) -> pb.GetRequestResponse:
    """What a submitted request has given so far."""
    response = pb.GetRequestResponse(request=request_info(generation, now))
    for index, output in sorted(submission.outputs.items()):
        reason = f"FINISH_REASON_{output.finish_reason.name}" if output.finish_reason is not None else None
        response.outputs.add(
            index=index,
            text="".join(output.texts),
            token_ids=output.token_ids,
            finish_reason=reason,
            logprobs=make_logprobs(output.logprobs),
            prompt_logprobs=make_logprobs(output.prompt_logprobs),
            cumulative_logprob=output.cumulative_logprob,
        )
    if submission.usage is not None:
        response.usage.CopyFrom(make_usage(submission.usage))
    if submission.error is not None:
        response.error.CopyFrom(pb.RequestError(reason=submission.error.reason, message=str(submission.error)))
    return response


def iteration_plan(last: Iteration) -> pb.GetIterationPlanResponse:
    """What the last iteration did."""
    return pb.GetIterationPlanResponse(
        step_id=last.step_id,
        plan=str(last),
        prefills=_plan_items(last.prefills()),
        decodes=_plan_items(last.decodes()),
        started=_plan_items(last.started()),
        preempted=_plan_items(last.preempted()),
        swapped_out=_plan_items(last.swapped_out()),
        swapped_in=_plan_items(last.swapped_in()),
        num_waiting_requests=last.num_waiting,
        duration_ms=last.seconds * 1000,
        cache_wait_ms=last.cache_wait_seconds * 1000,
    )


def _plan_items(tasks: Iterable[Task]) -> list[pb.PlanItem]:
    return [
        pb.PlanItem(
            request_id=task.sequence.request.request_id,
            index=task.sequence.index,
            num_context_tokens=task.num_context,
            num_query_tokens=task.num_query,
        )
        for task in tasks
    ]
