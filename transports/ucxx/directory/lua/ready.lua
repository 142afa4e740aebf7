-- Ready indexes: which rows, or whole groups, one task may claim by one set of fields, first ready first.

local function since(row, fields)
  local last = row[ELIGIBLE]
  if last == 0 then return nil end
  local prod = row[PROD]
  for j = 1, #fields do
    local seq = prod[fields[j]]
    if not seq then return nil end
    if seq > last then last = seq end
  end
  return last
end

-- Loads the rows of the groups that are whole by number.
local function whole(P, groups, rows)
  local members, ask, out = {}, {}, {}
  for name, g in pairs(groups) do
    if g[ROWS] > 0 and fit_count(g) >= (g[EXPECT] > 0 and g[EXPECT] or P.gsize) then
      local rids = g.alike and {} or fit(g)
      members[name] = rids
      for _, rid in ipairs(rids) do
        out[#out + 1] = rid
        if not rows[rid] then ask[#ask + 1] = rid end
      end
    end
  end
  local blobs = load_rows(P.K, ask)
  for j, rid in ipairs(ask) do rows[rid] = unpack_(blobs[j]) end
  return members, out
end

-- Rows of groups that were ready and are not any more wait again, unless they are claimed.
local function wait_again(P, ix, rids)
  local claims, add = hmget(P.K .. 'k:' .. ix[2], rids), {}
  for j, blob in ipairs(load_rows(P.K, rids)) do
    if blob and not claims[j] then add[#add + 1] = unpack_(blob)[CREATED]; add[#add + 1] = rids[j] end
  end
  many('ZADD', P.K .. 'w:' .. ix[1], add)
end

-- Which of these groups an index has as ready, by the names that they had in it.
local function were_ready(P, ix, groups)
  local keys, names, were = {}, {}, {}
  for _, member in ipairs(P.stale) do keys[#keys + 1] = member; names[#names + 1] = string.sub(member, WIDTH + 1) end
  for name, g in pairs(groups) do
    if g[OLDEST] ~= '' and not g.alike then keys[#keys + 1] = g[OLDEST] .. name; names[#names + 1] = name end
  end
  for i = 1, #keys, CHUNK do
    local scores = redis.call('ZMSCORE', P.K .. 'q:' .. ix[1], unpack(keys, i, math.min(i + CHUNK - 1, #keys)))
    for j = 1, #scores do if scores[j] then were[names[i + j - 1]] = true end end
  end
  return were
end

-- Returns which of these groups are ready, by name. `new`: rids that wait in no index yet.
local function touch_groups(P, ix, groups, members, all, rows, new)
  local taken, ready, were = {}, {}, were_ready(P, ix, groups)
  local claims = hmget(P.K .. 'k:' .. ix[2], all)
  for j, rid in ipairs(all) do taken[rid] = claims[j] end
  local add, rem, waits, waited, memo = {}, {}, {}, {}, {}
  for j, member in ipairs(P.stale) do rem[j] = member end -- not unpack(): a call may rename more groups than fit a stack
  for name, g in pairs(groups) do
    local last = members[name] and 0
    if last and g.alike then last = since(g.alike, ix[3]) end
    for _, rid in ipairs(members[name] or {}) do
      local row = rows[rid]
      if memo[row] == nil then memo[row] = since(row, ix[3]) or false end -- new rows share theirs
      local seq = not taken[rid] and memo[row]
      if not seq then last = nil break end
      if seq > last then last = seq end
    end
    if last then
      ready[name] = true
      add[#add + 1] = last; add[#add + 1] = g[OLDEST] .. name
      if not were[name] then
        for _, rid in ipairs(members[name]) do if not new[rid] then waited[#waited + 1] = rid end end
      end
    else
      if g[OLDEST] ~= '' then rem[#rem + 1] = g[OLDEST] .. name end
      if were[name] then for _, rid in ipairs(split(g[MEMBERS])) do waits[#waits + 1] = rid end end
    end
  end
  many('ZREM', P.K .. 'q:' .. ix[1], rem)
  many('ZADD', P.K .. 'q:' .. ix[1], add)
  many('ZREM', P.K .. 'w:' .. ix[1], waited)
  wait_again(P, ix, waits)
  return ready
end

-- Since which put rows are ready in each index: {index -> {position -> put}}, nil for what is not.
local function ready_since(P, list)
  local out = {}
  for _, ix in ipairs(P.ix) do
    local puts = {}
    for j, row in pairs(list) do puts[j] = since(row, ix[3]) end
    out[ix[1]] = puts
  end
  return out
end

-- Rows that are and stay claimed (`stay`) are in no index of their task.
local function touch_rows(P, ix, rids, list, new, taken, stay, before)
  local same = P.alike and since(P.alike, ix[3]) -- new rows without a difference
  if same then
    enqueue_new(P.K .. 'q:' .. ix[1], same, rids)
    return
  end
  local add, rem, w_add, w_rem, memo = {}, {}, {}, {}, {}
  for j, rid in ipairs(rids) do
    local row, was, free = list[j], before[j], not taken[rid]
    local put = memo[row] -- new rows of a put share theirs
    if put == nil then put = since(row, ix[3]) or false; memo[row] = put end
    if free or not stay then
      if was and not (free and was == put) then note(rem, was, rid) end
      if free and put and was ~= put then note(add, put, rid) end
      if free and not put then
        w_add[#w_add + 1] = row[CREATED]; w_add[#w_add + 1] = rid
      elseif not new[j] and not was then
        w_rem[#w_rem + 1] = rid
      end
    end
  end
  enqueue(P.K .. 'q:' .. ix[1], add, rem)
  many('ZADD', P.K .. 'w:' .. ix[1], w_add)
  many('ZREM', P.K .. 'w:' .. ix[1], w_rem)
end

-- Tells all indexes (or those of `only`) that rows, and the groups they are or were in, have changed.
-- rids[j] -> list[j], in the group names[j]; new[j] where the row did not exist before; before: ready_since() of the rows that
-- may have been ready.
local function touch(P, rids, list, names, new, groups, only, before)
  if #P.ix == 0 then return end
  local old, rows, fresh, members, all = {}, {}, {}, nil, nil
  if P.gsize then
    if not P.alike then
      for j, rid in ipairs(rids) do rows[rid], fresh[rid] = list[j], new[j] end
    end
    members, all = whole(P, groups, rows)
  end
  if not P.alike then
    for j, rid in ipairs(rids) do if not new[j] then old[#old + 1] = rid end end
  end
  for _, ix in ipairs(only or P.ix) do
    local taken = {}
    local claims = hmget(P.K .. 'k:' .. ix[2], old)
    for j, rid in ipairs(old) do taken[rid] = claims[j] end
    if P.gsize then
      local ready = touch_groups(P, ix, groups, members, all, rows, fresh)
      local w_add, w_rem = {}, {}
      for j, rid in ipairs(rids) do
        local row = list[j]
        if not taken[rid] and not (row[FAILED] ~= 1 and ready[names[j]]) then
          w_add[#w_add + 1] = row[CREATED]; w_add[#w_add + 1] = rid
        elseif not new[j] then
          w_rem[#w_rem + 1] = rid
        end
      end
      many('ZADD', P.K .. 'w:' .. ix[1], w_add)
      many('ZREM', P.K .. 'w:' .. ix[1], w_rem)
    else
      touch_rows(P, ix, rids, list, new, taken, not only, before and before[ix[1]] or {})
    end
  end
end

-- Takes rows out of all indexes: they are gone. Their groups are told. held[task][j]: the claim of a row.
local function untouch(P, rids, list, groups, held)
  for _, ix in ipairs(P.ix) do
    local waits, rem = {}, {}
    for j, rid in ipairs(rids) do
      if not held[ix[2]][j] then -- else it is in no index of this task
        local put = not P.gsize and since(list[j], ix[3])
        if put then note(rem, put, rid) else waits[#waits + 1] = rid end
      end
    end
    many('ZREM', P.K .. 'w:' .. ix[1], waits)
    enqueue(P.K .. 'q:' .. ix[1], {}, rem)
  end
  if P.gsize then touch(P, {}, {}, {}, {}, groups) end
end

local function drop_index(P, ix)
  redis.call('UNLINK', P.K .. 'q:' .. ix[1], P.K .. 'w:' .. ix[1], P.K .. 'b:' .. ix[1])
end

-- Shows some shelves of rows that were there before an index to it; the server is busy with them for 30 ms at most.
local PAGE = 1024 -- rows, and the rest of the shelf
local function fill(P, ix)
  local rids, list, groups, names, shelf = {}, {}, {}, {}, nil
  repeat
    shelf = redis.call('ZPOPMIN', P.K .. 'b:' .. ix[1])[1]
    local flat = shelf and redis.call('HGETALL', P.K .. 'r:' .. shelf) or {}
    for j = 1, #flat, 2 do
      local row = unpack_(flat[j + 1])
      rids[#rids + 1], list[#list + 1], names[#names + 1] = flat[j], row, row[GROUP]
    end
  until not shelf or #rids >= PAGE
  if P.gsize then load_groups(P, names, groups) end
  touch(P, rids, list, names, {}, groups, { ix })
  if shelf then return end
  ix[4] = nil
  save(P)
end

-- The index of a task and a set of fields (numbers, ascending), built on first use; [4] while it is being built.
local MOST_INDEXES = 32
local function index(P, task, fields)
  local name = table.concat(fields, ',')
  for _, ix in ipairs(P.ix) do
    if ix[2] == task and table.concat(ix[3], ',') == name then
      if ix[4] then fill(P, ix) end
      return ix
    end
  end
  if #P.ix >= MOST_INDEXES then drop_index(P, table.remove(P.ix, 1)) end
  P.ixn = P.ixn + 1
  local ix = { P.ixn, task, fields, true }
  P.ix[#P.ix + 1] = ix
  save(P)
  local todo = {}
  for _, shelf in ipairs(redis.call('ZRANGE', P.K .. 's', 0, -1)) do todo[#todo + 1] = 0; todo[#todo + 1] = shelf end
  many('ZADD', P.K .. 'b:' .. ix[1], todo)
  fill(P, ix)
  return ix
end

local function all_rows(P)
  local flat = every_row(P.K)
  local rids, rows = {}, {}
  for j = 1, #flat, 2 do rids[#rids + 1] = flat[j]; rows[flat[j]] = unpack_(flat[j + 1]) end
  table.sort(rids)
  local list = {}
  for j, rid in ipairs(rids) do list[j] = rows[rid] end
  return rids, list
end

-- Whole groups were declared for rows that are there already.
local function regroup(P)
  for _, ix in ipairs(P.ix) do drop_index(P, ix) end
  P.ix = {}
  local groups, expected = {}, {}
  local flat = redis.call('HGETALL', P.K .. 'g')
  for j = 1, #flat, 2 do expected[flat[j]] = unpack_(flat[j + 1])[EXPECT] end
  redis.call('UNLINK', P.K .. 'd')
  local rids, list = all_rows(P)
  for j, row in ipairs(list) do
    local name = row[GROUP]
    local g = groups[name] or no_group()
    groups[name] = g
    g[EXPECT] = expected[name] or 0
    join(P, g, name, rids[j], row[ID])
    note_failed(P, g, rids[j], row[FAILED] == 1)
    count_row(g, row, homes_of(P, pieces_of(row[CELLS])), 1)
  end
  P.stale = {}
  save_groups(P, groups)
end
